"""Breadth first through a small world: every event in every state, and slices of work between them.

A state without work is kept as a copy. Work in progress cannot be copied (it is generators), so a state with work is
kept as the last state without, and the moves since: it is reached again by replaying those, which is exact. Two such
states are the same if they come from the same one by the same moves, so nothing is left out by taking two states for
one. Between two states without work there are at most ``events`` events, wherever they fall between the slices: with 1
every event's work ends before the next, which goes deep; with 2 a second event may come between any two slices.

Depth counts events; slices cost nothing. At depth d, every sequence of d events was tried with all these interleavings.
"""

from collections import deque
from dataclasses import dataclass
from time import monotonic

from testbed.exhaustive.small_world import Move, Setting, SmallWorld

STEP: Move = ("step",)
PATIENCE = 60.0
"""Seconds until a search that has seen no answer is taken to have none."""


@dataclass(frozen=True)
class Node:
    snapshot: bytes
    digest: bytes
    since: tuple[Move, ...]
    depth: int
    path: tuple[Move, ...]

    @property
    def events(self) -> int:
        return sum(move != STEP for move in self.since)

    def world(self) -> SmallWorld:
        world = SmallWorld.load(self.snapshot)
        for move in self.since:
            world.apply(move)
        return world


@dataclass
class Found:
    """What a search came to. ``depth`` is the number of events up to which every sequence was tried."""

    name: str
    events: int
    depth: int = 0
    quiet: int = 0
    working: int = 0
    moves: int = 0
    frontier: int = 0
    answers: int = 0
    seconds: float = 0.0

    @property
    def states(self) -> int:
        return self.quiet + self.working

    def __str__(self) -> str:
        rate = self.moves / max(self.seconds, 0.001)
        return (
            f"{self.name}, {self.events} at once: depth {self.depth}, {self.states} states "
            f"({self.quiet} without work), {self.moves} moves, {self.answers} answers, frontier {self.frontier}, "
            f"{self.seconds:.1f} s, {rate:.0f} moves/s"
        )


class Broken(AssertionError):
    """A rule does not hold, after these moves from the world's start."""


def search(setting: Setting, events: int, seconds: float, least_depth: int) -> Found:
    """Search until the time is over, and in any case until every sequence of ``least_depth`` events was tried.

    A machine that is too slow to have seen an answer by then goes on until there is one, for a bounded time.
    """
    start = monotonic()
    found = Found(setting.name, events)
    root = SmallWorld(setting)
    root.run()
    root.check()
    first = Node(root.dump(), root.digest(), (), 0, ())
    seen: set[object] = {first.digest}
    found.quiet = 1
    queue = deque([first])
    while queue:
        node = queue[0]
        found.depth = node.depth
        took = monotonic() - start
        if node.depth >= least_depth and took > (seconds if found.answers else max(seconds, PATIENCE)):
            break
        queue.popleft()
        for move in moves_of(node):
            found.moves += 1
            following = follow(node, move, seen, found)
            if following is None:
                continue
            if move == STEP:
                queue.appendleft(following)
            else:
                queue.append(following)
    found.frontier = len(queue)
    found.seconds = monotonic() - start
    return found


def moves_of(node: Node) -> list[Move]:
    world = node.world()
    return [STEP, *world.moves()] if world.core.has_work else list(world.moves())


def follow(node: Node, move: Move, seen: set[object], found: Found) -> Node | None:
    """The state after ``move`` if it is a new one; where no further event may come between, after all its work."""
    path = (*node.path, move)
    depth = node.depth + (move != STEP)
    try:
        world = node.world()
        answered = world.answered
        world.apply(move)
        if world.core.has_work and node.events + (move != STEP) < found.events:
            name = node.digest, (*node.since, move)
            if name in seen:
                return None
            seen.add(name)
            found.working += 1
            found.answers += world.answered - answered
            world.check()
            return Node(node.snapshot, node.digest, name[1], depth, path)
        while world.core.has_work:
            world.check()
            world.apply(STEP)
            found.working += 1
        found.answers += world.answered - answered
        digest = world.digest()
        if digest in seen:
            return None
        seen.add(digest)
        found.quiet += 1
        world.check()
        snapshot = world.dump()
        world.close()
    except Exception as error:
        raise Broken(f"{found.name}: {type(error).__name__}: {error} after {list(path)}") from error
    return Node(snapshot, digest, (), depth, path)
