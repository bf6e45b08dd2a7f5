"""What a remote store alone has to say."""

from dataclasses import dataclass

from kvhold.core.events.incoming import BackingOpened, FromBacking


@dataclass(slots=True, frozen=True)
class RemoteOpened(BackingOpened):
    """There is one; it does not serve before :class:`Serves` says so. A ``read_only`` one gets nothing."""

    read_only: bool = False


@dataclass(slots=True, frozen=True)
class Serves(FromBacking):
    """Whether it is of use from now on: while it does not ``serve``, it is told of nothing but what to forget."""

    serves: bool
