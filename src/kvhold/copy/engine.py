"""The copy engine for a device."""

from collections.abc import Sequence
from typing import Protocol

from kvhold.client.arena import ArenaMapping
from kvhold.copy.job import GroupCopy, Job
from kvhold.copy.layout import PagedLayout


class Copier(Protocol):
    """Copies blocks between one rank's KV cache, group by group, and arenas. Only one thread begins copies."""

    def register(self, arena: ArenaMapping) -> None:
        """Make ``arena`` ready to be copied to and from; may take seconds, on a thread of the caller's."""

    def unregister(self, arena: ArenaMapping) -> None:
        """Undo :meth:`register`; no copy of ``arena`` runs any more."""

    def begin_publish(self, arena: ArenaMapping, group: int, blocks: Sequence[int], offsets: Sequence[int]) -> Job:
        """Copy ``blocks[i]`` to byte ``offsets[i]`` of ``arena`` after all that was submitted to the device so far."""

    def begin_restore(self, arena: ArenaMapping, copies: Sequence[GroupCopy]) -> Job:
        """Copy ``arena`` to the blocks of ``copies`` after all that was submitted to the device so far."""

    def unbind(self) -> None:
        """Forget where the KV cache is, once no copy reads or writes it. Nothing is begun until :meth:`bind`."""

    def bind(self, layouts: Sequence[PagedLayout]) -> None:
        """Copy from and to ``layouts``, with blocks of the same sizes as before, from now on."""

    def advance(self) -> None:
        """Called once per engine step, after its copies were begun, by the thread that begins them."""

    def close(self) -> None:
        """End after the copies that were begun."""


def make_copier(layouts: Sequence[PagedLayout]) -> Copier:
    """The copy engine for the groups of one rank, all on one device. Raises ValueError for one that has none."""
    device = layouts[0].device
    kind = device.split(":")[0]
    if kind == "cpu":
        from kvhold.copy.host import HostCopier

        return HostCopier(layouts)
    if kind == "cuda":
        from kvhold.copy.cuda import CudaCopier

        return CudaCopier(layouts)
    raise ValueError(f"kvhold: KV caches on device {device!r} are not supported; cpu and cuda are")
