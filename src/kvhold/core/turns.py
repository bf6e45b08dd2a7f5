"""Work that is not finished, in fair turns: who has much to do waits for its own, and not the others for it."""

from collections import OrderedDict, deque
from collections.abc import Iterator

from kvhold.core.events import Effect

Work = Iterator[list[Effect]]
"""Work in slices, each of which costs about one batch."""

MANAGER = 0
"""Owner of what no session asked for."""


class Turns:
    """Pieces of work by whose they are. Each owner has a slice in its turn, and each of its pieces in that."""

    def __init__(self) -> None:
        self._pieces: OrderedDict[int, deque[tuple[Work, bool]]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def __len__(self) -> int:
        return sum(map(len, self._pieces.values()))

    def of(self, owner: int) -> int:
        """How many pieces of an owner are not finished."""
        return len(self._pieces.get(owner, ()))

    def add(self, work: Work, owner: int, question: bool) -> None:
        """A ``question`` is of no use once its owner is gone."""
        self._pieces.setdefault(owner, deque()).append((work, question))

    def slice(self) -> list[Effect]:
        """One slice for the owner, and of the piece, that has waited longest."""
        owner, pieces = next(iter(self._pieces.items()))
        self._pieces.move_to_end(owner)
        work, question = pieces.popleft()
        effects = next(work, None)  # which may bring its owner more work
        if effects is not None:
            pieces.append((work, question))
        if not pieces:
            del self._pieces[owner]
        return effects or []

    def forget(self, owner: int) -> None:
        """The owner is gone: nobody hears the answers to its questions."""
        left = deque(piece for piece in self._pieces.pop(owner, ()) if not piece[1])
        if left:
            self._pieces[owner] = left
