"""What a rule is: one short sentence about the core's collections, and one short check of it.

A rule of :func:`each` is checked of one thing after the other, each at one moment; one of :func:`together` of all at
once. Neither asks what happened before, so both hold between any two events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from kvhold.core.state import Core

T = TypeVar("T")

TOLD = 3
"""Of so many things that a rule does not hold of is told, and of the others how many they are."""


class Finding(NamedTuple):
    """A rule that does not hold, and of what."""

    rule: str
    of: tuple[str, ...]

    def __str__(self) -> str:
        more = f", and {len(self.of) - TOLD} more" if len(self.of) > TOLD else ""
        return f"{self.rule}; not so: {', '.join(self.of[:TOLD])}{more}"


@dataclass(frozen=True)
class Things(Generic[T]):
    """``of`` a core, all of one kind, in an order that changes little; how one is ``named``, and how many are few."""

    of: Callable[[Core], Sequence[T]]
    named: Callable[[Core, T], str]
    few: int = 1


@dataclass(frozen=True)
class Each:
    """``says`` what ``holds`` of each of the ``things``."""

    says: str
    things: Things[Any]
    holds: Callable[[Core, Any], bool]

    def findings(self, core: Core, things: Iterable[Any]) -> list[Finding]:
        holds, named = self.holds, self.things.named
        return _finding(self.says, lambda: [named(core, thing) for thing in things if not holds(core, thing)])


@dataclass(frozen=True)
class Together:
    """``says`` what holds of all; ``wrong`` names what it does not hold of."""

    says: str
    wrong: Callable[[Core], Iterable[str]]

    def findings(self, core: Core) -> list[Finding]:
        return _finding(self.says, lambda: self.wrong(core))


def _finding(says: str, wrong: Callable[[], Iterable[str]]) -> list[Finding]:
    """What books that are wrong make of a rule, which may be that it cannot be looked at."""
    try:
        found = tuple(wrong())
    except Exception as error:  # noqa: BLE001 - it is told of, and the manager serves on
        found = (f"it cannot be looked at ({type(error).__name__}: {error})",)
    return [Finding(says, found)] if found else []


def each(things: Things[T], says: str) -> Callable[[Callable[[Core, T], bool]], Each]:
    return lambda holds: Each(says, things, holds)


def together(says: str) -> Callable[[Callable[[Core], Iterable[str]]], Together]:
    return lambda wrong: Together(says, wrong)


class Rules:
    """All of them, of some modules."""

    def __init__(self, *modules: object) -> None:
        every = [rule for module in modules for rule in vars(module).values()]
        self.together = [rule for rule in every if isinstance(rule, Together)]
        self.each: dict[Things[Any], list[Each]] = {}
        for rule in every:
            if isinstance(rule, Each):
                self.each.setdefault(rule.things, []).append(rule)

    @property
    def sentences(self) -> list[str]:
        return [rule.says for rules in self.each.values() for rule in rules] + [rule.says for rule in self.together]

    def findings(self, core: Core) -> list[Finding]:
        """Every rule that does not hold now."""
        found: list[Finding] = []
        for things, rules in self.each.items():
            of = things.of(core)
            for rule in rules:
                found += rule.findings(core, of)
        for whole in self.together:
            found += whole.findings(core)
        return found

    def slices(self, core: Core) -> Iterator[list[Finding]]:
        """The same bit by bit, with events between them: of a few things, or one rule about all of them, at a time.

        What comes and goes meanwhile may be passed over: the next time it is looked at.
        """
        for things, rules in self.each.items():
            start = 0
            while some := things.of(core)[start : start + things.few]:
                yield [finding for rule in rules for finding in rule.findings(core, some)]
                start += things.few
        for whole in self.together:
            yield whole.findings(core)


def counted(**pairs: tuple[object, object]) -> Iterator[str]:
    """What is not as it was counted."""
    for name, (is_so, said) in pairs.items():
        if is_so != said:
            yield f"{name.replace('_', ' ')} is {is_so}, and said to be {said}"
