"""``kvhold status``, ``flush`` and ``purge``."""

import json
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from kvhold import protocol as wire
from kvhold.cli.ask import Socket, ask, ask_on, connect, fail, find, groups_of, parse_namespace
from kvhold.cli.show import AsJson, show
from kvhold.units import format_duration, format_size, parse_duration

_DISK_SECONDS = 60.0
"""What disks have to do may take so long."""


def status(
    socket: Socket = None,
    as_json: AsJson = False,
) -> None:
    """Say what a manager holds and who is attached."""
    reply = ask(socket, wire.Status())
    assert isinstance(reply, wire.StatusReply)
    report: dict[str, Any] = json.loads(reply.document)
    show(report, _lines(report), as_json)


def _lines(report: dict[str, Any]) -> Iterator[str]:
    """The report for a person."""
    arena, accounts, counters = report["arena"], report["accounts"], report["counters"]
    kind = "an engine's own manager" if report["embedded"] else "manager"
    yield f"{kind} {report['version']} on {report['socket']}, up {format_duration(report['uptime_seconds'])}"
    yield f"arena    {format_size(arena['bytes'])}, {format_size(arena['populated'])} populated"
    yield "bytes    " + ", ".join(f"{name} {format_size(size)}" for name, size in accounts.items() if size)
    only = f", {report['objects_in_logs_only']} of them only on SSD" if report["logs"] else ""
    yield f"objects  {report['objects']}{only}; {report['evicted']} evicted so far"
    asked, found, read = (counters.get(name, 0) for name in ("keys_asked", "keys_resident", "keys_read"))
    tiers = bool(report["logs"])
    yield f"queries  {counters.get('queries', 0)}; {_hits(asked, found, read, tiers)}"
    clients = ", ".join(f"{each['connected']} of {each['limit']} {kind}" for kind, each in report["clients"].items())
    yield f"clients  {clients}; {report['unfinished']} pieces of their work are not finished"
    for log in report["logs"]:
        yield f"ssd      {_ssd(log)}"
        for direction, out in log["out_of_use"].items():
            yield f"         {_OUT_OF_USE[direction, out['why']].format(format_duration(out['seconds']))}{_why(log)}"
    for closed in report["closed_logs"]:
        yield f"ssd      {closed['path']} is not open since {format_duration(closed['seconds'])}: {closed['reason']}"
    for space in report["spaces"]:
        name = space["model"] or ("unnamed" if space["users"] else "served by no engine since this manager started")
        held = f"{space['objects']} objects of {format_size(space['object_bytes'])}"
        yield f"space    {name}, group {space['group']}: {held}, {format_size(space['dram_bytes'])} of DRAM"
        yield f"         namespace {space['namespace']}"
        yield f"         {_hits(space['keys_asked'], space['keys_found'], space['keys_read'], tiers)}{_ages(space)}"
    if (more := report["spaces_known"] - len(report["spaces"])) > 0:
        yield f"space    and {more} more, which were used less recently"
    for session in report["sessions"]:
        state = "" if session["open"] else ", lost: its bytes wait for the end of the process"
        who = f"{session['role']} rank {session['rank']}, pid {session['pid']}, {session['engine']}"
        yield f"session  {session['session']}: {who}{state}"


_OUT_OF_USE = {
    ("read", "errors"): "it is not read since {}, because that failed",
    ("read", "hangs"): "it is not read, because a read has been under way for {}",
    ("write", "errors"): "it is not written since {}, because that failed",
    ("write", "hangs"): "it is not written, because a write has been under way for {}",
}


def _why(log: dict[str, Any]) -> str:
    return f" ({log['last_error']})" if log["last_error"] else ""


def _hits(asked: int, found: int, read: int, tiers: bool) -> str:
    """How much of what was asked for was there, and where if there are several ``tiers``."""
    if not asked:
        return "no key was asked for yet"
    on_ssd = f", {read} of them on SSD ({read / asked:.0%})" if tiers else ""
    return f"{found} of {asked} keys were here ({found / asked:.0%}){on_ssd}"


def _ages(space: dict[str, Any]) -> str:
    """When a space was used last, and what of it was used longest ago."""
    idle, oldest = space["idle_seconds"], space["oldest_seconds"]
    if idle is None:
        return "; not used since this manager started"
    used = f"; used {format_duration(idle)} ago"
    return used if oldest is None else f"{used}, the oldest in DRAM {format_duration(oldest)} ago"


def _ssd(log: dict[str, Any]) -> str:
    """One directory: what it keeps, what waits to be written, and what is wrong with it."""
    recovery, errors = log["recovery"], log["errors"] | log["rejected"]
    parts = [
        f"{log['path']}: {format_size(log['live_bytes'])} of {format_size(log['budget_bytes'])}",
        f"{recovery.get('records', 0)} records found at the start",
        f"{log['queued_writes']} writes queued",
    ]
    if log["oldest_seconds"] is not None:
        parts.append(f"the oldest stored {format_duration(log['oldest_seconds'])} ago")
    if errors:
        parts.append("errors: " + " ".join(f"{kind} {count}" for kind, count in sorted(errors.items())))
    if not log["ready"]:
        parts.append("index being rebuilt")
    return ", ".join(parts)


def flush(socket: Socket = None, as_json: AsJson = False) -> None:
    """Write to SSD what waits to be written, return when it is there, and say how much of all that is."""
    socket = find(socket)
    answer = ask(socket, wire.Flush(), _DISK_SECONDS)
    assert isinstance(answer, wire.Flushed)
    directories, on_ssd = answer.kept.get("log", (0, 0))
    if not directories:
        fail(
            f"the manager on {socket} has no SSD open, so all that it has is lost when it ends; `kvhold status` names "
            "directories that it waits for, and `kvhold serve --ssd PATH:SIZE` gives it one"
        )
    document = {"socket": str(socket), "objects": answer.objects, "on_ssd": on_ssd}
    said = f"flushed: the manager on {socket}: {on_ssd} of {answer.objects} objects are on SSD"
    show(document, [said], as_json)


def purge(
    socket: Socket = None,
    namespace: Annotated[
        str | None, typer.Option(help="Only this namespace, in hex as `kvhold status` shows it.")
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(help="Only what is older, e.g. 7d: on SSD by when its segment was begun, else by its last use."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Everything that it has.")] = False,
    as_json: AsJson = False,
) -> None:
    """Forget what a manager has stored, also after a restart; what is being restored is kept until that ends.

    Say what: --namespace, --older-than, both, or --all. The bytes stay on an SSD until their segment is used again.
    """
    named = namespace is not None or older_than is not None
    if not named and not everything:
        raise typer.BadParameter(
            "say what to forget: --namespace HEX for one model, --older-than 7d for what is old, --all for everything"
        )
    if named and everything:
        raise typer.BadParameter("is everything; leave it out, or the others", param_hint="--all")
    name = b"" if namespace is None else parse_namespace(namespace)
    try:
        older = 0.0 if older_than is None else parse_duration(older_than)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--older-than") from None
    channel = connect(socket)
    unknown = bool(name) and groups_of(channel, name) == ([], False)
    answer = ask_on(channel, wire.Purge(name, older), _DISK_SECONDS)
    assert isinstance(answer, wire.Purged)
    forgotten = f"{answer.objects} object{'' if answer.objects == 1 else 's'}, {format_size(answer.bytes)}"
    document = {"socket": str(channel.path), "objects": answer.objects, "bytes": answer.bytes}
    show(document, [f"purged: the manager on {channel.path} has forgotten {forgotten}"], as_json)
    if unknown:  # its SSD may have what there was no room to know of
        typer.echo(f"this manager knew no namespace {namespace}; `kvhold status` lists those that it knows", err=True)
