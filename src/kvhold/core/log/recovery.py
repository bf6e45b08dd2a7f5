"""What a log was found to have when it was opened."""

from kvhold.core.arena import slot_bytes
from kvhold.core.common import Common
from kvhold.core.indexes import Index
from kvhold.core.log.device import Device
from kvhold.core.log.events import Recovered, Segments
from kvhold.core.log.segments import pack, table_bytes, unpack
from kvhold.core.rows import State


def found(common: Common, device: Device, event: Segments) -> None:
    for number, seq, age in event.lives:
        device.log.adopt(number, seq, common.now - age)


def recovered(common: Common, device: Device, event: Recovered) -> None:
    """Records of one segment; of two of the same object the one of the younger segment counts.

    Of two in different backings the one that was found first does.
    """
    catalogue, limits, log = common.catalogue, common.limits, device.log
    segment = log.segments[event.segment]
    geometry: tuple[bytes, int, int, tuple[int, ...]] | None = None  # of the record before: most are alike
    index: Index | None = None
    purged = False
    for namespace, group, key, shards, at in event.records:
        if not key or (namespace, group, key) in device.lost:
            continue
        if (namespace, group, len(key), shards) != geometry:
            geometry = namespace, group, len(key), shards
            purged = any(name in (b"", namespace) and segment.seq <= seq for name, seq in device.purged)
            crowded = len(catalogue.indexes) >= limits.known_spaces and catalogue.find(namespace, group) is None
            if crowded and not purged:
                common.counters["recovered_over"] += 1
                geometry = None
                continue
            index = None if purged else catalogue.index(*geometry, slot_bytes(shards))
        if index is None:
            common.counters["recovered_foreign"] += not purged
            continue
        row = index.get(key)
        place = pack(log.number, segment.number, at)
        if row is None:
            if catalogue.objects >= limits.max_objects:
                common.counters["recovered_over"] += 1
                catalogue.drop_index_if_idle(index)
                geometry = None
                continue
            row = catalogue.recover(index, key, place, segment.born)
        else:
            if known := catalogue.place[row]:
                number, other, _ = unpack(known)
                elsewhere = number != log.number or log.segments[other].seq > segment.seq
                if elsewhere or catalogue.state[row] == State.LOADING:
                    continue
                catalogue.withdraw(row, known)
            catalogue.put(row, place)
        segment.rows.append(row)
        segment.tables[index.id] = table_bytes(len(shards))
        common.counters["recovered"] += 1
