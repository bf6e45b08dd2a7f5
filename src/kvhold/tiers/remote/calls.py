"""What becomes of one call at a store: names are made, bytes are checked, and what is wrong is removed there."""

import os
import time
from collections import Counter
from collections.abc import Sequence

from kvhold.tiers.remote import messages as ms
from kvhold.tiers.remote.record import HEADER, Wanted, Wrong, check, encode, name, prefix
from kvhold.tiers.remote.stores import ABSENT, UNKNOWN, Slot, Store

_PROBED = 64 << 10


class Calls:
    """``arena`` is all of it; no more than the items' own bytes are touched.

    With ``read_only``, nothing in the store is changed.
    """

    def __init__(self, store: Store, pool: str, arena: memoryview, read_only: bool) -> None:
        self._store = store
        self._pool = pool
        self._arena = arena
        self._read_only = read_only

    def carry_out(self, call: ms.Call) -> ms.Answer:
        """Raises whatever the store does: then nothing is known of any of it."""
        if isinstance(call, ms.Exists):
            there = self._store.exists([name(self._pool, *each) for each in call.names])
            return ms.Answer(call.call, good=tuple(index for index, yes in enumerate(there) if yes))
        if isinstance(call, ms.Get):
            return self._get(call)
        if isinstance(call, ms.Put):
            return self._put(call)
        if isinstance(call, ms.Remove):
            names = [name(self._pool, *each) for each in call.names]
            self._store.remove(names, "" if call.namespace is None else prefix(self._pool, call.namespace))
            return ms.Answer(call.call)
        return self._probe(call)

    def _get(self, call: ms.Get) -> ms.Answer:
        names = self._names(call.items)
        slots = [Slot(memoryview(bytearray(HEADER)), self._payload(item)) for item in call.items]
        good, created, unknown, wrong, bad = [], [], [], Counter[str](), []
        sizes = self._store.get(names, slots)
        for index, (item, slot, size) in enumerate(zip(call.items, slots, sizes, strict=True)):
            if size == ABSENT:
                continue
            if size == UNKNOWN:
                unknown.append(index)
                continue
            told = Wrong.LENGTH if size != slot.length else check(*slot, _wanted(item), item.time)
            if isinstance(told, Wrong):
                wrong[told.value] += 1
                bad.append(names[index])
            else:
                good.append(index)
                created.append(told)
        if bad and not self._read_only:
            try:
                self._store.remove(bad, "")
            except Exception:  # noqa: BLE001 - it is not believed, whether it goes or not
                wrong["not_removed"] += len(bad)
        moved = sum(slots[index].length for index in good)
        return ms.Answer(
            call.call, good=tuple(good), created=tuple(created), unknown=tuple(unknown), wrong=dict(wrong), bytes=moved
        )

    def _put(self, call: ms.Put) -> ms.Answer:
        """What is there already is left alone, and only what is there in the end counts."""
        names = self._names(call.items)
        absent = [index for index, there in enumerate(self._store.exists(names)) if not there]
        there = set(range(len(names))) - set(absent)
        moved = 0
        if absent:
            slots = []
            for index in absent:
                item, payload = call.items[index], self._payload(call.items[index])
                slots.append(Slot(memoryview(encode(_wanted(item), item.time, payload)), payload))
            self._store.put([names[index] for index in absent], slots)
            proved = self._store.exists([names[index] for index in absent])
            came = [position for position, yes in enumerate(proved) if yes]
            moved = sum(slots[position].length for position in came)
            there |= {absent[position] for position in came}
        refused = tuple(index for index in absent if index not in there)
        return ms.Answer(call.call, good=tuple(sorted(there)), refused=refused, bytes=moved)

    def _probe(self, call: ms.Probe) -> ms.Answer:
        wanted = Wanted(b"probe", 0, os.urandom(16), b"", 0, (_PROBED,))
        called = name(self._pool, *wanted[:3])
        if self._store.exists([called])[0]:
            return ms.Answer(call.call, error="it says that it has what nobody ever put there")
        if self._read_only:
            return ms.Answer(call.call)
        payload = bytearray(os.urandom(_PROBED))
        try:
            self._store.put([called], [Slot(memoryview(encode(wanted, time.time_ns(), payload)), memoryview(payload))])
            took, why = self._store.exists([called])[0], "it says that it took a value, and does not have it"
        except Exception as error:  # noqa: BLE001 - a library's own; it answered, but took nothing
            took, why = False, said(error)
        if not took:
            return ms.Answer(call.call, error=why[:2000], refusing=True)
        slot = Slot(memoryview(bytearray(HEADER)), memoryview(bytearray(_PROBED)))
        size = self._store.get([called], [slot])[0]
        told = check(*slot, wanted, 0) if size == slot.length else Wrong.LENGTH
        self._store.remove([called], "")
        if isinstance(told, Wrong):
            return ms.Answer(call.call, error=f"it gave back other bytes than it was given: {told.value}")
        if self._store.exists([called])[0]:
            return ms.Answer(call.call, error="it still has what was removed")
        return ms.Answer(call.call)

    def _names(self, items: Sequence[ms.Item]) -> list[str]:
        return [name(self._pool, item.namespace, item.group, item.key) for item in items]

    def _payload(self, item: ms.Item) -> memoryview:
        end = item.offset + sum(item.shards)
        if end > len(self._arena):
            raise ValueError(f"{sum(item.shards)} bytes at {item.offset} are not in the arena")
        return self._arena[item.offset : end]


def said(error: Exception) -> str:
    """What a library says of its failure, or at least what kind that is."""
    return str(error) or type(error).__name__


def _wanted(item: ms.Item) -> Wanted:
    return Wanted(item.namespace, item.group, item.key, item.parent, item.depth, item.shards)
