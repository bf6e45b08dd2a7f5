"""What is stored by name: namespaces and their groups, the keys of each, and which of them nobody has open."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from kvhold.core.limits import Limits, Quota
from kvhold.core.recency import Recency
from kvhold.core.rows import Rows

_SPREAD = 256
"""Dictionaries of a large space: growing one of many stalls for microseconds, a big one for tens of milliseconds."""
_SMALL = 1024
"""Keys of a space for which one dictionary is enough: most spaces stay below, and collecting garbage looks at all."""
_NO_QUOTA = Quota()


class Namespace:
    """``used`` are the slot bytes of everything under this name, granted credits included.

    ``label`` is what people call it, as who opened it last said. ``wanting`` counts the open spaces that want credits.
    """

    __slots__ = ("indexes", "label", "name", "quota", "used", "wanting")

    def __init__(self, name: bytes, quota: Quota) -> None:
        self.name = name
        self.label = ""
        self.quota = quota
        self.used = 0
        self.wanting = 0
        self.indexes: dict[int, Index] = {}


class Index:
    """The keys of one (namespace, group): objects of one geometry. ``slots`` counts its rows that have one.

    ``watchers`` are the (session, space) that are told what leaves it, in the order in which they came. Of the keys
    ``asked`` for, ``found`` were here, ``read`` of them in a log alone. ``used_at`` is when any was stored or used.
    In a ``chain`` an object is of use only beside all that come before it. A ``private`` one is of no use to anybody
    once its only engine has left it. ``recency`` is the eviction policy's list of its objects.
    """

    __slots__ = (
        "asked",
        "chain",
        "found",
        "group",
        "id",
        "key_bytes",
        "maps",
        "mask",
        "namespace",
        "objects",
        "private",
        "read",
        "recency",
        "shards",
        "size",
        "slots",
        "used_at",
        "users",
        "watchers",
    )

    def __init__(
        self, id: int, namespace: Namespace, group: int, key_bytes: int, shards: tuple[int, ...], size: int
    ) -> None:
        self.id = id
        self.namespace = namespace
        self.group = group
        self.key_bytes = key_bytes
        self.shards = shards
        self.size = size
        self.chain = False
        self.private = False
        self.users = 0
        self.objects = 0
        self.slots = 0
        self.asked = self.found = self.read = 0
        self.used_at: int | None = None
        self.watchers: dict[tuple[int, int], None] = {}
        self.maps: list[dict[bytes, int]] = [{}]  # by as much of a key's last byte as :attr:`mask` leaves
        self.mask = 0
        self.recency: Any = None

    def get(self, key: bytes) -> int | None:
        return self.maps[key[-1] & self.mask].get(key)

    def leading(self, keys: Sequence[bytes]) -> list[int]:
        """The rows of the leading ones of ``keys`` that are there."""
        maps, found = self.maps, list[int]()
        try:  # nearly always it is all of them, which is fastest without a step that could end early
            if self.mask:
                return [maps[key[-1]][key] for key in keys]
            known = maps[0]
            return [known[key] for key in keys]
        except KeyError:
            for key in keys:
                if (row := self.get(key)) is None:
                    break
                found.append(row)
            return found

    def put(self, key: bytes, row: int) -> None:
        self.objects += 1
        self.maps[key[-1] & self.mask][key] = row
        if self.objects > _SMALL and not self.mask:
            known = self.maps[0]
            self.maps, self.mask = [{} for _ in range(_SPREAD)], _SPREAD - 1
            for one, at in known.items():
                self.maps[one[-1] & self.mask][one] = at

    def pop(self, key: bytes) -> None:
        self.objects -= 1
        del self.maps[key[-1] & self.mask][key]

    def some(self, count: int) -> list[bytes]:
        """Up to ``count`` keys; none if there are none."""
        return list(islice(next(filter(None, self.maps), ()), count))

    def __len__(self) -> int:
        return self.objects


class Indexed(Rows):
    """Rows that belong to indexes, and a ``policy`` that has a list of each index's objects."""

    def __init__(self, limits: Limits, policy: Callable[[Rows], Recency[Namespace, Any]]) -> None:
        super().__init__()
        self.limits = limits
        self.indexes: dict[int, Index] = {}
        self.namespaces: dict[bytes, Namespace] = {}
        self.recency = policy(self)
        self._by_name: dict[tuple[bytes, int], Index] = {}
        self._next_index = 1
        self._unused: OrderedDict[int, Index] = OrderedDict()  # that nobody has open, as they were left

    def index(self, namespace: bytes, group: int, key_bytes: int, shards: tuple[int, ...], size: int) -> Index | None:
        """The index of (namespace, group), made when new; None if it exists with another geometry."""
        found = self._by_name.get((namespace, group))
        if found is None:
            owner = self.namespaces.get(namespace)
            if owner is None:
                quota = self.limits.quotas.get(namespace, _NO_QUOTA)
                owner = self.namespaces[namespace] = Namespace(namespace, quota)
            found = Index(self._next_index, owner, group, key_bytes, shards, size)
            found.recency = self.recency.open(size, owner)
            self._next_index += 1
            self._unused[found.id] = found
            owner.indexes[found.id] = self._by_name[namespace, group] = self.indexes[found.id] = found
        elif found.shards != shards or found.key_bytes != key_bytes:
            return None
        return found

    def find(self, namespace: bytes, group: int) -> Index | None:
        return self._by_name.get((namespace, group))

    def use(self, index: Index) -> None:
        """Somebody opens it."""
        index.users += 1
        self._unused.pop(index.id, None)

    def leave(self, index: Index) -> None:
        """Somebody who had it open has not any more."""
        index.users -= 1
        if not index.users:
            self._unused[index.id] = index
            self.drop_index_if_idle(index)

    def longest_unused(self) -> Index | None:
        """Take out, of those that nobody has open, the one that was left longest ago: it is about to be forgotten."""
        return self._unused.popitem(last=False)[1] if self._unused else None

    def take_unused(self, id: int) -> Index | None:
        """Take out this one, if nobody has it open and it is not about to be forgotten already."""
        return self._unused.pop(id, None)

    def drop_index_if_idle(self, index: Index) -> None:
        """Forget an index that nobody uses and nothing is stored under."""
        if index.users or index.objects or index.slots or self.indexes.pop(index.id, None) is None:
            return
        self._unused.pop(index.id, None)
        del self._by_name[index.namespace.name, index.group]
        self.recency.close(index.recency)
        owner = index.namespace
        del owner.indexes[index.id]
        if not owner.indexes:
            del self.namespaces[owner.name]

    def configure(self, limits: Limits) -> None:
        self.limits = limits
        for namespace in self.namespaces.values():
            namespace.quota = limits.quotas.get(namespace.name, _NO_QUOTA)
