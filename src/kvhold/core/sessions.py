"""Who may still touch which bytes.

An *attachment* is one engine instance's scheduler session and worker sessions of one generation. It owns leases and
credits as a whole: the scheduler half decides, but it is the workers that read and write. So what it owns is freed
only when every one of its sessions has said so or is proved dead; a closed socket proves nothing.
"""

from dataclasses import dataclass, field

from kvhold.core.catalogue import Index
from kvhold.core.events import Role


@dataclass(slots=True)
class Lease:
    """What one query holds: ``rows`` of its chain, of which those from ``skip`` on are leased."""

    index: Index
    skip: int
    rows: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Space:
    """One index as one attachment sees it, with the credits it holds there."""

    index: Index
    want: int  # credits its owner can use; 0 once closed
    credits: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Session:
    id: int
    role: Role
    attachment: "Attachment"
    rank: int
    mapped: bool = False


@dataclass(slots=True)
class Attachment:
    id: int
    instance: str
    world: int
    broken: bool = False  # a session was lost: nobody joins it any more, and it decides nothing
    ready: bool = False
    sessions: dict[int, Session] = field(default_factory=dict)  # those not proved gone
    limbo: set[int] = field(default_factory=set)  # sessions whose socket closed without a word
    leases: dict[int, Lease] = field(default_factory=dict)
    spaces: dict[int, Space] = field(default_factory=dict)
    answering: int = 0  # questions whose answer is still being put together

    @property
    def held_bytes(self) -> int:
        leased = sum(max(0, len(lease.rows) - lease.skip) * lease.index.size for lease in self.leases.values())
        return leased + sum(len(space.credits) * space.index.size for space in self.spaces.values())

    @property
    def scheduler(self) -> Session | None:
        return next((s for s in self.sessions.values() if s.role is Role.SCHEDULER), None)

    @property
    def complete(self) -> bool:
        """The scheduler half and every rank are here, and every rank has mapped the arena."""
        mapped = sum(s.mapped for s in self.sessions.values() if s.role is Role.WORKER)
        return self.scheduler is not None and mapped == self.world
