"""Rules about what can be found: keys, the spaces they are in, and the namespaces of those."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvhold.core.audit.memory import ROWS, SLOT
from kvhold.core.audit.rules import Things, counted, each, together
from kvhold.core.indexes import Index, Namespace
from kvhold.core.rows import STATES, State

if TYPE_CHECKING:
    from kvhold.core.state import Core

FOUND = frozenset(state for state, facts in STATES.items() if facts.found)

INDEXES: Things[Index] = Things(
    lambda core: list(core.catalogue.indexes.values()),
    lambda _, index: f"group {index.group} of namespace {index.namespace.name.hex()}",
    few=64,
)
NAMESPACES: Things[Namespace] = Things(
    lambda core: list(core.catalogue.namespaces.values()), lambda _, owner: f"namespace {owner.name.hex()}", few=64
)


@each(ROWS, "a row that can be found is in its index, under its key and with its size")
def found(core: Core, row: int) -> bool:
    cat = core.catalogue
    if cat.state[row] not in FOUND:
        return True
    index, key = cat.indexes.get(cat.owner[row]), cat.key[row]
    return index is not None and bool(key) and index.get(key) == row and cat.size[row] == index.size


@each(ROWS, "a row that cannot be found has no key")
def key(core: Core, row: int) -> bool:
    return core.catalogue.state[row] in FOUND or not core.catalogue.key[row]


@together("all and only rows that can be found are in an index")
def objects(core: Core) -> Iterator[str]:
    cat = core.catalogue
    rows = sum(cat.state.count(state) for state in FOUND)
    keeping = cat.backings.keeping
    backed = sum(bool(place or there & keeping) for place, there in zip(cat.place, cat.there, strict=True))
    return counted(
        number_of_keys=(sum(len(index) for index in cat.indexes.values()), rows),
        number_of_objects=(rows, cat.objects),
        number_of_objects_in_a_backing_alone=(cat.state.count(State.COLD), cat.cold),
        number_of_objects_in_backings=(backed, cat.backed),
    )


@each(INDEXES, "an index counts its keys")
def keys(_: Core, index: Index) -> bool:
    return sum(map(len, index.maps)) == len(index)


@each(INDEXES, "an index that nobody has open and that holds nothing is forgotten")
def idle(_: Core, index: Index) -> bool:
    return bool(index.users or len(index) or index.slots)


@each(INDEXES, "an index is found by its namespace and group")
def named(core: Core, index: Index) -> bool:
    owner, by_id = index.namespace, core.catalogue.indexes.get(index.id)
    return core.catalogue.find(owner.name, index.group) is by_id is owner.indexes.get(index.id) is index


@each(INDEXES, "of the keys asked for some were found, and of those some were read")
def asked(_: Core, index: Index) -> bool:
    return 0 <= index.read <= index.found <= index.asked


@each(INDEXES, "an index was used in the past")
def used_at(core: Core, index: Index) -> bool:
    return index.used_at is None or 0 <= index.used_at <= core.common.now


@together("the keys that all indexes were asked for are among those that the counters count")
def totals(core: Core) -> Iterator[str]:
    indexes, counters = core.catalogue.indexes.values(), core.counters
    for name, count in (
        ("keys_asked", sum(index.asked for index in indexes)),
        ("keys_resident", sum(index.found for index in indexes)),
        ("keys_read", sum(index.read for index in indexes)),
    ):
        if count > counters[name]:
            yield f"{count} of {counters[name]} {name}"


@together("an index counts its rows that have a slot")
def slots(core: Core) -> Iterator[str]:
    cat = core.catalogue
    owners = Counter(owner for owner, state in zip(cat.owner, cat.state, strict=True) if state in SLOT)
    for index in cat.indexes.values():
        if index.slots != owners.pop(index.id, 0):
            yield INDEXES.named(core, index)
    yield from (f"{count} rows of index {id}, which is not known" for id, count in owners.items())


@each(NAMESPACES, "a namespace counts the bytes of its slots")
def used(_: Core, owner: Namespace) -> bool:
    return owner.used == sum(index.slots * index.size for index in owner.indexes.values())


@each(NAMESPACES, "all and only namespaces that have an index are known")
def spaces(core: Core, owner: Namespace) -> bool:
    return bool(owner.indexes) and all(core.catalogue.indexes.get(id) is one for id, one in owner.indexes.items())


@together("each index belongs to a namespace that is known")
def owners(core: Core) -> Iterator[str]:
    known = core.catalogue.namespaces
    for index in core.catalogue.indexes.values():
        if known.get(index.namespace.name) is not index.namespace:
            yield INDEXES.named(core, index)


@together("whoever watches was told of all that has left")
def gone(core: Core) -> Iterator[str]:
    return (f"key {key.hex()}" for _, key in core.catalogue.gone)
