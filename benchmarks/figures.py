"""Medians, spread and ratios of things that were measured in turns within one run."""

import statistics
from collections.abc import Callable, Sequence


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> str:
    """Median and the range of the middle half."""
    ordered = sorted(values)
    low, high = ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]
    return f"{median(values):.4g} [{low:.4g} .. {high:.4g}]"


def in_turns(rounds: int, **variants: Callable[[], float]) -> dict[str, list[float]]:
    """Each variant once per round, in an order that rotates, so that drift of the machine falls on all alike."""
    names = list(variants)
    measured: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            measured[name].append(variants[name]())
    return measured


def ratios(values: Sequence[float], of: Sequence[float]) -> list[float]:
    """Paired, round by round."""
    return [value / base for value, base in zip(values, of, strict=True)]


def goal(value: float, most: float) -> str:
    """Whether ``value`` keeps to a goal of at most ``most``."""
    return f"(goal {most:g}: {'met' if value <= most else 'MISSED'})"
