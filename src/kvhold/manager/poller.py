"""Which descriptors are ready: epoll, which also says of a socket that nobody wants to read that its peer is gone."""

import select
from collections.abc import Callable

READ, WRITE, HUNG_UP = select.EPOLLIN, select.EPOLLOUT, select.EPOLLHUP | select.EPOLLERR

Told = Callable[[int], None]


class Poller:
    """Descriptors, what is waited for of each, and who is told of it, with a mask of what has come."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._told: dict[int, Told] = {}

    def register(self, descriptor: int, told: Told, events: int = READ) -> None:
        self._epoll.register(descriptor, events)
        self._told[descriptor] = told

    def modify(self, descriptor: int, events: int) -> None:
        """Wait for ``events``. :data:`HUNG_UP` is told in any case."""
        self._epoll.modify(descriptor, events)

    def unregister(self, descriptor: int) -> None:
        """To be called before it is closed; it need not be registered."""
        if self._told.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def poll(self, timeout: float | None) -> list[tuple[Told, int]]:
        """Who is to be told what now. One of them may have closed what is another's by the time that this is told."""
        return [(self._told[descriptor], mask) for descriptor, mask in self._epoll.poll(timeout)]

    def close(self) -> None:
        self._epoll.close()
