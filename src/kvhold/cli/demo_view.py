"""What the demo shows: its progress, its table, and the reasons when something was not restored."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.table import Table

from kvhold.cli.demo_engine import Answer
from kvhold.units import format_size


class Progress:
    """What is being done: one changing line on a terminal, else a line each. To standard error."""

    def __init__(self, animate: bool) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._status = self._console.status("") if animate and self._console.is_terminal else None

    def __enter__(self) -> "Progress":
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def say(self, text: str) -> None:
        if self._status is not None:
            self._status.update(text)
        else:
            self._console.print(f"... {text}", soft_wrap=True)

    def stop(self) -> None:
        if self._status is not None:
            self._status.stop()


def print_summary(question: str, runs: Sequence[tuple[str, Answer]], about: dict[str, Any]) -> None:
    """The answer, and a row for each run."""
    console = Console(highlight=False)
    computed = runs[0][1]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("prompt", no_wrap=True)
    for head in ("tokens", "computed", "engine's", "kvhold's", "first token", "restored", "GiB/s"):
        table.add_column(head, justify="right", no_wrap=True)
    for name, answer in runs:
        size, seconds = answer.metric("load_bytes"), answer.metrics.get("load_seconds", 0)
        sources = [answer.metric(name) for name in ("local_compute", "local_cache_hit", "external_kv_transfer")]
        table.add_row(
            name,
            *(str(count) for count in (sum(sources), *sources)),
            f"{answer.first_token_seconds * 1000:.0f} ms",
            format_size(size) if size else "",
            f"{size / seconds / 2**30:.2f}" if seconds else "",
        )
    console.print(f"Question  {question}", markup=False, soft_wrap=True)
    console.print(f"Answer    {computed.text.strip()}", markup=False, soft_wrap=True)
    console.print()
    console.print(table)
    console.print()
    after, fresh, crashed = (computed.first_token_seconds / answer.first_token_seconds for _, answer in runs[2:])
    console.print(
        f"First token from kvhold {after:.1f} times as fast as computed, {fresh:.1f} times in the fresh engine, "
        f"{crashed:.1f} times from SSD.\n"
        "Manager: the one that engine A started, as an engine does where no `kvhold serve` runs.\n"
        "Engine B attached to its socket, and A had ended before B was asked. Then B and the manager were killed\n"
        "(SIGKILL); engine C started another manager on the same SSD directory, and the prompt was its first.\n"
        f"SmolLM2-135M-Instruct in {about['dtype']} on vLLM {about['vllm']}, {about['device']}, "
        f"threads: {about['threads']}.",
        markup=False,
        soft_wrap=True,
    )


def why_no_hit(computed: Answer, answer: Answer, report: dict[str, Any] | None, log: list[str]) -> list[str]:
    """What the engine and the manager have counted, and what kvhold said at the end of the log."""
    misses = {
        name.removeprefix("tokens_missed_"): int(count)
        for name, count in answer.metrics.items()
        if name.startswith("tokens_missed_") and count
    }
    missed = ", ".join(f"{count} missed ({reason.replace('_', ' ')})" for reason, count in misses.items())
    lines = [
        f"engine   asked for {answer.metric('tokens_asked')} tokens: {answer.metric('tokens_hit')} found"
        + (f", {missed}" if missed else ""),
        f"engine   {answer.metric('load_failures')} of {answer.metric('loads')} restores failed",
        f"engine   published {computed.metric('blocks_published')} blocks when it computed the prompt, "
        f"{computed.metric('publish_failures')} failures, {computed.metric('blocks_without_credit')} without a slot",
    ]
    if report is None:
        lines.append("manager  none answers")
    else:
        arena, counters = report["arena"], report["counters"]
        lines += [
            f"manager  on {report['socket']}, up {report['uptime_seconds']:.0f} s",
            f"manager  arena {format_size(arena['bytes'])}, {format_size(arena['populated'])} populated",
            f"manager  {report['objects']} objects, {report['evicted']} evicted",
            f"manager  {counters.get('queries', 0)} queries, {counters.get('keys_resident', 0)} of "
            f"{counters.get('keys_asked', 0)} keys were here",
            f"manager  {len(report['sessions'])} sessions of engines",
            *(f"manager  SSD {log.get('path')}: {log}" for log in report["logs"]),
        ]
    return lines + [f"log      {line}" for line in log if "kvhold" in line]
