"""kill -9 under load, again and again on one directory: right bytes or a miss, and what was written is found again."""

import itertools
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from testbed.process.manager_process import Manager
from testbed.process.peers import populated, until
from testbed.process.ssd_load import (
    SPACES,
    Client,
    Known,
    Life,
    Lost,
    bytes_of,
    calm,
    lives,
    look,
    no_damage,
    purge,
    rebuilt,
    reports,
    right_records,
    settle,
)

BUDGET = 16 << 20
"""Five segments of 3 MiB: a second of load goes through all of them."""
CHAINS, LENGTH = 8, 24
Serve = Callable[..., Manager]
Name = tuple[bytes, int]

HARM = ("bad_header", "bad_footer", "torn", "truncated", "bad_log", "bad_tombstones", "foreign_record")
"""What a rebuild may count of damage."""

CHAIN = [[chain << 16 | position for position in range(LENGTH)] for chain in range(CHAINS)]
KEYS = [key for chain in CHAIN for key in chain]


class Rounds:
    """One directory and what is known of it, through the lives of many managers."""

    def __init__(self, manager: Manager, directory: Path, seed: int, checked: bool) -> None:
        self.manager = manager
        self.checked = checked  # whether the disk is good, and so all of it must be there
        self.directory = directory
        self.luck = random.Random(seed)
        self.known = Known()
        self.written: dict[Life, set[Name]] = {}  # what was at rest when it was looked at last
        self.killed = False
        self.found = 0
        self.read = 0
        self.purges = 0
        self.settled = 0

    def attach(self) -> list[Client]:
        return [Client(self.manager.socket, space, self.known) for space in SPACES]

    def kill(self) -> None:
        self.killed = True
        os.kill(self.manager.pid, signal.SIGKILL)

    def load(self, seconds: float) -> None:
        """Work until the manager is killed, ``seconds`` from now or at a moment of our choice."""
        self.killed = False
        clients = self.attach()
        timer = threading.Timer(seconds, self.kill)
        timer.start()
        try:
            while True:
                self.deed(self.luck.choice(clients))
        except Lost:
            pass
        finally:
            timer.cancel()
            timer.join()
            for client in clients:
                client.close()
        until(lambda: not self.manager.alive, "the end of the killed manager")
        assert self.killed, f"the manager ended by itself:\n{self.manager.log_tail()}"
        calm(self.manager)
        assert bytes_of(self.directory) <= BUDGET

    def deed(self, client: Client) -> None:
        luck = self.luck
        chain = luck.choice(CHAIN)
        what = luck.random()
        if what < 0.5:
            at = luck.choice([0, 0, LENGTH // 2])
            while at < LENGTH and luck.random() < 0.8:
                at += client.publish(chain, at, 8)
        elif what < 0.85:
            client.ask(chain[: luck.randrange(1, LENGTH + 1)])
        elif what < 0.93:
            client.leave_asked(chain)
        elif what < 0.98:
            self.rest()
        else:
            client.sync()
            namespace = luck.choice([b"", client.space.namespace])
            purge(self.manager.socket, self.known, namespace)
            self.purges += 1
            for names in self.written.values():
                names -= {name for name in names if namespace in (b"", name[0])}
            if luck.random() < 0.5:
                self.kill()

    def rest(self) -> None:
        """Wait until all is written, and remember what is on the disk then."""
        report = settle(self.manager.socket)
        if self.checked:
            no_damage(report)
            self.written = right_records(self.directory, self.known)
            self.settled += 1
        if self.luck.random() < 0.3:
            self.kill()

    def expected(self) -> set[Name]:
        """What must be found now: it was written, and its segment has not begun another life since."""
        names = set().union(*(self.written.get(life, set()) for life in lives(self.directory)))
        gone = self.known.asked_for_purge
        return {name for name in names if name[0] not in gone}

    def verify(self) -> None:
        """What the next manager finds: all that was written, and nothing that was purged."""
        expected = self.expected() if self.checked else set()
        clients = self.attach()
        populated(self.manager.socket)
        for client in clients:  # while it is being rebuilt, anything may be missing, and nothing be wrong
            client.ask(self.luck.choice(CHAIN))
            client.sync()
        rebuilt(self.manager.socket)
        for left, client in enumerate(clients):  # what one holds, the other may not find room beside, in four pages
            reports(self.manager.socket, lambda said, left=left: len(said["instances"]) == len(clients) - left, "bye")
            namespace = client.space.namespace
            tiers = dict(zip(KEYS, client.tiers(KEYS), strict=True))
            there = [key for key in KEYS if tiers[key]]
            missing = [hex(key) for key in KEYS if (namespace, key) in expected and not tiers[key]]
            assert not missing, f"{client.space.name}: written, and not found after a kill: {missing}"
            back = [hex(key) for key in there if (namespace, key) not in self.known.stored]
            assert not back, f"{client.space.name}: purged, and found again: {back}"
            self.found += len(there)
            for start in range(0, len(there), 8):
                part = there[start : start + 8]
                answer = client.ask(part)
                self.read += answer.resident
                if self.checked:
                    assert answer.resident == len(part), answer
            client.bye()
        if self.checked:
            no_damage(look(self.manager.socket))
        if self.known.asked_for_purge:  # nobody was told that it is done: whoever wants it says so again
            purge(self.manager.socket, self.known)
        self.written = {}


def start(serve: Serve, folder: Path, seed: int, checked: bool = True) -> Rounds:
    directory = folder / "ssd"
    manager = serve("--ssd", f"{directory}:{BUDGET}", "--ssd-min-free", "1MiB", dram="8MiB")
    return Rounds(manager, directory, seed, checked)


def go_on(times: int, enough: Callable[[], bool]) -> Iterator[None]:
    """So many rounds, and more if they showed too little: how much is done before a kill is up to the machine."""
    for done in itertools.count():
        if done >= times and enough():
            return
        assert done < 5 * times, "rounds with hardly anything to find"
        yield


def crash(rounds: Rounds, times: int) -> None:
    def enough() -> bool:
        newest = max((seq for _, seq in lives(rounds.directory)), default=0)  # are segments used again?
        return min(rounds.found, rounds.read) > 40 * times and min(rounds.settled, rounds.purges) > 0 and newest > 15

    for _ in go_on(times, enough):
        rounds.load(rounds.luck.choice([0.1, 0.3, 0.3, 0.6]) * rounds.luck.random())
        rounds.manager.start()
        rounds.verify()


def test_rounds_of_kill_9(serve: Serve, folder: Path) -> None:
    rounds = start(serve, folder, 1)
    crash(rounds, 10)
    assert rounds.manager.terminate() == 0


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 110))
def test_many_rounds_of_kill_9(serve: Serve, folder: Path, seed: int) -> None:
    crash(start(serve, folder, seed), 40)


# --- damage -----------------------------------------------------------------------------------------------------------


def damage(rounds: Rounds) -> None:
    """What a bad disk may have made of what a killed manager left."""
    luck, directory = rounds.luck, rounds.directory
    newest = max(lives(directory), key=lambda life: life[1])[0]
    if luck.random() < 0.7:
        path = directory / f"kvhold-{newest:08}.segment"
        os.truncate(path, luck.randrange(path.stat().st_size))
    for path in sorted(directory.iterdir()):
        if not (size := path.stat().st_size):
            continue
        # Each tombstone is there twice: one flipped bit brings nothing back, two may.
        flips = luck.randrange(2) if path.name == "kvhold.tombstones" else luck.choice([0, 0, 1, 5, 50])
        with path.open("r+b") as file:
            for _ in range(flips):
                # Headers and footers are a small part of a file, and the one that matters.
                at = luck.choice(
                    [luck.randrange(size), luck.randrange(min(size, 4096)), size - 1 - luck.randrange(512)]
                )
                file.seek(max(at, 0))
                old = file.read(1)
                file.seek(max(at, 0))
                file.write(bytes([old[0] ^ 1 << luck.randrange(8)]))
    if luck.random() < 0.2:
        (directory / "kvhold.log").unlink()


def crash_and_damage(rounds: Rounds, times: int) -> None:
    harmed = 0

    def enough() -> bool:
        return harmed > times / 2 and rounds.read > 10 * times

    for _ in go_on(times, enough):
        rounds.load(0.3 * rounds.luck.random())
        if lives(rounds.directory):
            damage(rounds)
        rounds.manager.start()
        rounds.verify()
        for log in look(rounds.manager.socket)["logs"]:
            harmed += sum(log["rejected"].values()) + sum(log["recovery"].get(name, 0) for name in HARM)
        calm(rounds.manager)


def test_a_damaged_directory_gives_right_bytes_or_misses(serve: Serve, folder: Path) -> None:
    crash_and_damage(start(serve, folder, 2, checked=False), 6)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(200, 206))
def test_a_directory_that_is_damaged_again_and_again(serve: Serve, folder: Path, seed: int) -> None:
    crash_and_damage(start(serve, folder, seed, checked=False), 40)
