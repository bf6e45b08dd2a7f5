"""``kvhold keys``: what can be found."""

from pathlib import Path
from typing import Annotated

import typer

from kvhold import protocol as wire
from kvhold.cli.ask import Socket, ask_on, connect, fail, groups_of, parse_namespace
from kvhold.cli.show import AsJson, show

_TIERS = {wire.Tier.DRAM: "dram", wire.Tier.BACKING: "ssd"}


def keys(
    namespace: Annotated[str, typer.Argument(help="In hex as `kvhold status` shows it.")],
    group: Annotated[int, typer.Argument(min=0, max=(1 << 32) - 1, help="The cache group, as shown there.")],
    integers: Annotated[
        bool, typer.Option("--int", help="Print the integers that stand for hashes in vLLM's KV events.")
    ] = False,
    socket: Socket = None,
    as_json: AsJson = False,
) -> None:
    """Print each key that can be found, in hex, and where it is: in dram, or on ssd alone."""
    name = parse_namespace(namespace, "NAMESPACE")
    channel = connect(socket)
    groups, unsure = groups_of(channel, name)
    if group not in groups:
        fail(_unknown(namespace, group, groups, channel.path, unsure))
    found: dict[bytes, int] = {}
    cursor = 0
    while True:
        part = ask_on(channel, wire.List(name, group, cursor))
        assert isinstance(part, wire.Listed)
        width = len(part.keys) // max(1, len(part.tiers))
        for number, tier in enumerate(part.tiers):
            found[part.keys[number * width : (number + 1) * width]] = tier
        cursor = part.cursor
        if not cursor:
            break
    channel.close()
    named = {
        (str(int.from_bytes(key[-8:], "big")) if integers else key.hex()): _TIERS[tier] for key, tier in found.items()
    }
    show(named, (f"{key} {tier}" for key, tier in named.items()), as_json)


def _unknown(namespace: str, group: int, groups: list[int], path: Path, unsure: bool) -> str:
    there = ", ".join(map(str, groups))
    what = f"group {group} of this namespace, which has: {there}" if groups else f"namespace {namespace}"
    more = "what its SSD holds is not all known yet: ask again" if unsure else "`kvhold status` lists what it has"
    return f"the manager on {path} knows no {what}; {more}"
