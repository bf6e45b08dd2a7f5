"""Effects that are under way, cut into calls, and what has come of them."""

from collections import Counter, deque
from dataclasses import dataclass, field

from kvhold.core.events import Ask, Done, Forget, Found, Read, Write
from kvhold.tiers.remote import messages as ms

Effect = Ask | Read | Write | Forget


@dataclass(slots=True, eq=False)
class Job:
    """``left`` are the parts (first position, end) that are not under way, ``under_way`` how many are.

    ``bad`` has the positions that failed, and whether they may be as they were. ``told``: the core waits for it.
    """

    effect: Effect
    created: tuple[int, ...] = ()
    left: deque[tuple[int, int]] = field(default_factory=deque)
    under_way: int = 0
    there: list[int] = field(default_factory=list)
    bad: dict[int, bool] = field(default_factory=dict)
    ages: dict[int, int] = field(default_factory=dict)
    failed: bool = False
    told: bool = True

    def __post_init__(self) -> None:
        effect = self.effect
        if isinstance(effect, Ask):
            size, count = ms.NAMES, len(effect.names)
        elif isinstance(effect, Forget):
            size, count = ms.NAMES, max(1, len(effect.names))
        else:
            size, count = ms.PART, len(effect.objects)
        self.left.extend((first, min(first + size, count)) for first in range(0, count, size))

    @property
    def ended(self) -> bool:
        return not self.left and not self.under_way

    def lose(self, first: int, end: int) -> None:
        """These could not be looked at."""
        self.failed = True
        if isinstance(self.effect, Read | Write):
            self.bad.update((index, True) for index in range(first, end) if index not in self.bad)

    def give_up(self) -> None:
        """Nothing more of it is begun."""
        while self.left:
            self.lose(*self.left.popleft())

    def answer(self) -> Done | Found:
        """What the core hears of it."""
        effect = self.effect
        if isinstance(effect, Ask):
            return Found(effect.io, () if self.failed else tuple(sorted(self.there)), self.failed)
        if isinstance(effect, Forget):
            return Done(effect.io, (0,) if self.failed else ())
        failed = tuple(sorted(self.bad))
        if isinstance(effect, Write):
            return Done(effect.io, failed)
        ages = tuple(self.ages.get(index, 0) for index in range(len(effect.objects)))
        return Done(effect.io, failed, bool(failed) and all(self.bad.values()), ages)


class Hidden:
    """What is being forgotten: it counts as gone before the store has said so."""

    def __init__(self) -> None:
        self._namespaces = Counter[bytes]()
        self._names = Counter[ms.Name]()

    def add(self, forget: Forget) -> None:
        if forget.namespace is not None:
            self._namespaces[forget.namespace] += 1
        self._names.update(forget.names)

    def remove(self, forget: Forget) -> None:
        if forget.namespace is not None:
            self._namespaces = Counter(self._namespaces - Counter([forget.namespace]))
        for name in forget.names:
            self._names[name] -= 1
            if self._names[name] <= 0:
                del self._names[name]

    def __contains__(self, name: ms.Name) -> bool:
        if not self._namespaces and not self._names:
            return False
        return b"" in self._namespaces or name[0] in self._namespaces or name in self._names
