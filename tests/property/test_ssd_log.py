"""Any history of a log, ended by a kill or by a loss of power, any number of times: right bytes or a miss.

* Whatever a recovery finds and a read lets through is what was written at that place, and was not forgotten.
* After a kill every completed write is found. After a loss of power everything that was synced is.
"""

import errno
import random
from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from testbed.ssd.ssd_fakes import Driver, FakeFiles, Item

from kvhold.core.log.segments import BLOCK, HEADER

SEGMENTS, SEGMENT = 4, 64 << 10
NAMESPACES = (b"n" * 32, b"m" * 32)
Name = tuple[bytes, int, bytes]
Place = tuple[int, int]  # seq, at


@dataclass(frozen=True)
class Copy(Item):
    """What is stored under a key: other bytes each time, so that an old copy cannot pass for a new one."""

    serial: int = 0


@dataclass
class Life:
    segment: int  # its file's number; a log's own numbers may be others after a restart
    records: dict[Place, Copy] = field(default_factory=dict)
    tried: dict[Place, list[Copy]] = field(default_factory=dict)  # failed, and perhaps there
    synced: set[Place] = field(default_factory=set)


@dataclass
class Model:
    lives: dict[int, Life] = field(default_factory=dict)  # by seq, those that were not ended
    forgotten: dict[Name, Place] = field(default_factory=dict)
    unsure: set[Place] = field(default_factory=set)  # a forgetting that failed may hide them or not
    serial: int = 0

    def hidden(self, place: Place, item: Item) -> bool:
        names = (item.name, (item.namespace, -1, b""), (b"", -1, b""))
        return any(place < self.forgotten[name] for name in names if name in self.forgotten)

    def end_life(self, segment: int) -> None:
        self.lives = {seq: life for seq, life in self.lives.items() if life.segment != segment}


def begin(model: Model, driver: Driver) -> None:
    numbers = driver.log.numbers
    segment = numbers[(driver.segment + 1) % SEGMENTS]
    if driver.segment < 0:
        free = set(range(SEGMENTS)) - {life.segment for life in model.lives.values()}
        segment = min(free) if free else model.lives[min(model.lives)].segment
    if driver.begin(numbers.index(segment)):
        model.end_life(segment)
        model.lives[driver.seq] = Life(segment)
    elif model.lives:
        # It may have been written or not; either way nothing more can be said of what was there.
        for life in model.lives.values():
            if life.segment == segment:
                life.synced.clear()
                for place, item in life.records.items():
                    life.tried.setdefault(place, []).append(item)
                life.records.clear()


def store(model: Model, driver: Driver, chance: random.Random) -> None:
    life = model.lives.get(driver.seq)
    if life is None or life.segment != driver.log.numbers[driver.segment]:
        return
    copies: list[Copy] = []
    end = driver.end
    for _ in range(chance.randint(1, 4)):
        shards = tuple(BLOCK * chance.randint(1, 2) for _ in range(chance.randint(1, 3)))
        model.serial += 1
        copy = Copy(b"key%d" % chance.randrange(5), chance.choice(NAMESPACES), 0, shards, model.serial)
        end += HEADER + sum(shards)
        if end > SEGMENT - 2 * BLOCK:
            break
        copies.append(copy)
    if not copies:
        return
    ats = [stored.at for stored in driver.placed(copies, fill=False)]
    failed = driver.store(copies)
    for index, (at, copy) in enumerate(zip(ats, copies, strict=True)):
        if index in failed:
            life.tried.setdefault((driver.seq, at), []).append(copy)
        else:
            life.records[driver.seq, at] = copy


def forget(model: Model, driver: Driver, chance: random.Random) -> None:
    kind = chance.randrange(4)
    namespace = chance.choice(NAMESPACES)
    names: list[Name] = [(namespace, 0, b"key%d" % key) for key in range(chance.randint(1, 3))]
    if kind >= 2:
        names = [(b"" if kind == 3 else namespace, -1, b"")]
        worked = driver.forget(namespace=names[0][0])
    else:
        worked = driver.forget(*(Item(key, namespace) for namespace, _, key in names))
    position = (driver.seq, driver.end)
    for name in names:
        if worked:
            model.forgotten[name] = max(position, model.forgotten.get(name, (0, 0)))
        for life in model.lives.values():
            for place, copy in life.records.items():
                matches = name in (copy.name, (copy.namespace, -1, b""), (b"", -1, b""))
                if matches and not worked:
                    model.unsure.add(place)


def check(model: Model, driver: Driver, *, everything: bool) -> None:
    found = driver.recover()
    seen: set[Place] = set()
    for record in found:
        segment, seq, at = record[5:8]
        place = (seq, at)
        assert place not in seen
        data = driver.read(record)
        if data is None:
            continue  # what should have been there is missed below
        seen.add(place)
        life = model.lives[seq]  # nothing of a life that ended
        assert life.segment == driver.log.numbers[segment]
        copies = [*life.tried.get(place, ()), *([life.records[place]] if place in life.records else [])]
        right = [copy for copy in copies if (*copy.name, copy.shards, copy.payload) == (*record[:4], data)]
        assert right, "what was never written there"
        assert not model.hidden(place, right[0]), "what was forgotten"
    for life in model.lives.values():
        must = set(life.records) if everything else life.synced
        for place in must - seen - model.unsure:
            assert model.hidden(place, life.records[place]) or _after_forgotten_try(model, place), "lost"


def _after_forgotten_try(model: Model, place: Place) -> bool:
    """Where a write failed, a forgetting reaches over all that was tried: what is stored there later is hidden too."""
    life = model.lives[place[0]]
    ends = [at + HEADER + sum(copy.shards) for (_, at), copies in life.tried.items() for copy in copies]
    return bool(ends) and place[1] < max(ends)


def crash(model: Model, driver: Driver, chance: random.Random, *, power: bool) -> FakeFiles:
    files = driver.files
    files.fault, files.short = lambda operation, name: 0, lambda size: size
    if power:
        # First, so that nothing which the executor does while it ends counts.
        after = files.after_power_loss(chance.randrange)
        for life in model.lives.values():
            for place in set(life.records) - life.synced:
                life.tried.setdefault(place, []).append(life.records[place])
    else:
        after = files.after_kill()
    driver.executor.close(10)
    return after


def test_right_bytes_or_a_miss(quick: bool) -> None:
    how = settings(max_examples=20 if quick else 80, suppress_health_check=[HealthCheck.too_slow])
    how(given(st.data())(lives_and_crashes))()


def lives_and_crashes(data: st.DataObject) -> None:
    chance = data.draw(st.randoms(use_true_random=False))
    model = Model()
    files = FakeFiles()
    for _ in range(data.draw(st.integers(1, 4), label="rounds")):
        driver = Driver(files, SEGMENTS * SEGMENT + (64 << 10), SEGMENT)
        if not driver.log.newest_seq:  # without any life a forgetting hides nothing, and numbers begin with 1 again
            assert not model.lives
            model.forgotten.clear()
        for step in data.draw(st.lists(st.sampled_from("bsssssfyze!"), max_size=14), label="steps"):
            if step == "b":
                begin(model, driver)
            elif step == "s":
                store(model, driver, chance)
            elif step == "f":
                forget(model, driver, chance)
            elif (step == "y" and driver.executor.sync()) or (step == "e" and driver.segment >= 0 and driver.seal()):
                for seq, life in model.lives.items():
                    if step == "y" or seq == driver.seq:
                        life.synced |= set(life.records)
            elif step == "z":
                most = chance.choice((BLOCK, 2 * BLOCK, 5 * BLOCK))
                files.short = lambda size, most=most: min(size, most)  # type: ignore[misc]
            elif step == "!":
                after = chance.randint(0, 4)

                def fault(operation: str, name: str, left: list[int] = [after]) -> int:  # noqa: B006
                    left[0] -= operation in ("write", "sync", "create", "allocate")
                    return errno.EIO if -3 < left[0] < 0 else 0

                files.fault = fault
        power = data.draw(st.booleans(), label="power")
        files = crash(model, driver, chance, power=power)
        driver = Driver(files, SEGMENTS * SEGMENT + (64 << 10), SEGMENT)
        check(model, driver, everything=not power)
        driver.close()
        files = files.after_kill()
        for life in model.lives.values():  # what is there now stays there
            life.records = {place: copy for place, copy in life.records.items() if not power or place in life.synced}
