"""The catalogue: what goes first, and what must not go."""

import pytest
from testbed.core.core_world import NAMESPACE, PAGE, SLOT, chain

from kvhold.core.arena import Arena
from kvhold.core.catalogue import Catalogue
from kvhold.core.eviction import Eviction
from kvhold.core.indexes import Index, Namespace
from kvhold.core.limits import Quota
from kvhold.core.rows import State


class Shelf:
    """A catalogue of one index over ``pages`` pages of four slots, spoken of in keys."""

    def __init__(self, pages: int = 2, size: int = SLOT) -> None:
        self.arena = Arena(PAGE)
        self.arena.grow(pages)
        self.cat = Catalogue(self.arena)
        self.eviction = Eviction(self.cat)
        self.index = self.add_index(0, size)

    def add_index(self, group: int, size: int) -> Index:
        index = self.cat.index(NAMESPACE, group, 8, (size,), size)
        assert index is not None
        index.users += 1
        return index

    def put(self, keys: list[bytes], parent: bytes = b"", index: Index | None = None) -> None:
        index = self.index if index is None else index
        for key in keys:
            row = self.eviction.take(index)
            assert row is not None
            self.cat.insert(row, index, key, index.get(parent) if parent else None)
            parent = key

    def take(self, size: int) -> int | None:
        """A slot for something else of ``size``."""
        index = self.cat.index(b"p" * 32, size, 8, (size,), size)
        assert index is not None
        index.users = 1
        return self.eviction.take(index)

    def rows(self, keys: list[bytes]) -> list[int]:
        rows = [self.index.get(key) for key in keys]
        assert None not in rows
        return rows  # type: ignore[return-value]

    def kept(self, keys: list[bytes], index: Index | None = None) -> list[bytes]:
        return [key for key in keys if (self.index if index is None else index).get(key) is not None]

    def evicted(self, count: int, size: int = SLOT) -> list[bytes]:
        """What goes, in order, for ``count`` slots more than there is room for."""
        gone, slots = [], []
        before = {key for part in self.index.maps for key in part}
        while len(gone) < count:
            slots.append(self.take(size))
            assert slots[-1] is not None
            after = {key for part in self.index.maps for key in part}
            gone += sorted(before - after, reverse=True)
            before = after
        for slot in slots:
            self.cat.free(slot)
        return gone


@pytest.mark.parametrize("others", [0, 2000], ids=["a small index", "a large one"])
def test_the_leading_keys_that_are_there_end_before_the_first_that_is_not(others: int) -> None:
    index = Index(1, Namespace(NAMESPACE, Quota()), 0, 8, (SLOT,), SLOT)
    for row, key in enumerate(chain(others, "b")):
        index.put(key, row)
    keys = chain(6)
    for row, key in enumerate(keys):
        if row != 4:
            index.put(key, row)
    assert index.leading(keys[:4]) == index.leading(keys) == [0, 1, 2, 3]
    assert index.leading(keys[4:]) == []


def test_the_end_of_a_chain_goes_before_its_head():
    shelf = Shelf()
    keys = chain(8)
    shelf.put(keys)
    assert shelf.evicted(8) == keys[::-1]


def test_a_chain_that_grew_over_several_commits_still_goes_from_its_end():
    shelf = Shelf()
    keys, other = chain(5), chain(3, "b")
    shelf.put(keys[:2])
    shelf.put(other)
    shelf.put(keys[2:4], parent=keys[1])
    shelf.put(keys[4:], parent=keys[3])
    assert shelf.evicted(8) == keys[::-1] + other[::-1]


def test_branches_of_one_chain_go_before_what_they_share():
    shelf = Shelf()
    trunk, left, right = chain(2), chain(3, "l"), chain(3, "r")
    shelf.put(trunk)
    shelf.put(left, parent=trunk[-1])
    shelf.put(right, parent=trunk[-1])
    assert shelf.evicted(8) == left[::-1] + right[::-1] + trunk[::-1]


def test_a_part_without_its_parent_counts_as_new():
    shelf = Shelf()
    shelf.put(chain(2))
    shelf.put(chain(2, "b"), parent=b"nowhere.")
    assert shelf.evicted(4) == chain(2)[::-1] + chain(2, "b")[::-1]


def test_what_was_used_last_goes_last():
    shelf = Shelf()
    one, two = chain(4, "1"), chain(4, "2")
    shelf.put(one)
    shelf.put(two)
    shelf.cat.touch(shelf.rows(one), shelf.index)
    assert shelf.evicted(8) == two[::-1] + one[::-1]


def test_touching_part_of_a_chain_keeps_the_order_of_the_rest():
    shelf = Shelf()
    keys = chain(8)
    shelf.put(keys)
    shelf.cat.touch(shelf.rows(keys[:3]), shelf.index)
    assert shelf.evicted(8) == keys[::-1]
    shelf.put(keys)
    shelf.cat.touch(shelf.rows([keys[6], keys[1]]), shelf.index)
    assert shelf.evicted(8) == [keys[i] for i in (7, 5, 4, 3, 2, 0, 1, 6)]


def test_touching_a_row_twice_loses_nothing():
    shelf = Shelf()
    keys = chain(8)
    shelf.put(keys)
    for again in ([0, 1, 1], [1, 1], [0, 1, 2, 1], [2, 1, 2, 1, 0, 0]):
        shelf.cat.touch(shelf.rows([keys[i] for i in again]), shelf.index)
    assert sorted(shelf.evicted(8)) == keys


def test_touch_leaves_out_what_is_gone_or_became_something_else():
    shelf = Shelf()
    keys, other = chain(4), chain(4, "b")
    shelf.put(keys)
    shelf.put(other)
    stale = shelf.rows(keys)
    shelf.cat.remove(stale[1])
    shelf.cat.remove(stale[2])
    credit = shelf.take(SLOT)
    assert credit in stale
    shelf.cat.touch(stale, shelf.index)
    shelf.cat.free(credit)
    assert shelf.evicted(6) == [*other[::-1], keys[3], keys[0]]


def test_the_first_row_of_all_is_evicted_like_any_other():
    shelf = Shelf(pages=1)
    keys = chain(4)
    shelf.put(keys)
    assert shelf.evicted(4) == keys[::-1]


def test_leased_rows_are_passed_over_and_count_as_used():
    shelf = Shelf()
    keys = chain(8)
    shelf.put(keys)
    leased = shelf.rows(keys[4:])
    shelf.cat.lease(leased)
    assert shelf.evicted(4) == keys[3::-1]
    assert shelf.kept(keys) == keys[4:]
    shelf.cat.release(leased)
    shelf.put(chain(4, "b"))
    assert shelf.evicted(4) == keys[:3:-1]


def test_when_all_is_held_there_is_no_slot_and_no_loss():
    shelf = Shelf()
    keys = chain(8)
    shelf.put(keys)
    shelf.cat.lease(shelf.rows(keys))
    assert shelf.take(SLOT) is None
    assert shelf.kept(keys) == keys
    assert (shelf.cat.bytes[State.LEASED], shelf.cat.bytes[State.CREDIT]) == (8 * SLOT, 0)


def test_a_row_leased_twice_is_held_until_the_second_release():
    shelf = Shelf()
    shelf.put(chain(8))
    (row,) = shelf.rows(chain(1))
    shelf.cat.lease([row])
    shelf.cat.lease([row])
    shelf.cat.release([row])
    assert shelf.cat.state[row] == State.LEASED
    assert chain(1)[0] not in shelf.evicted(7)
    shelf.cat.release([row])
    assert shelf.cat.state[row] == State.RESIDENT
    assert shelf.cat.bytes[State.LEASED] == 0


def test_a_doomed_row_is_freed_by_its_last_release_and_not_before():
    shelf = Shelf()
    shelf.put(chain(1))
    (row,) = shelf.rows(chain(1))
    shelf.cat.lease([row])
    shelf.cat.lease([row])
    shelf.cat.remove(row)
    assert shelf.kept(chain(1)) == []
    assert shelf.cat.bytes[State.DOOMED] == SLOT
    shelf.cat.release([row])
    assert shelf.cat.state[row] == State.DOOMED
    shelf.cat.release([row])
    assert shelf.cat.state[row] == State.FREE
    assert shelf.arena.free_pages == 2


def test_leasing_and_releasing_nothing_is_nothing():
    cat = Catalogue(Arena(PAGE))
    cat.lease([])
    cat.release([])
    assert cat.bytes == [0] * len(cat.bytes)


def test_every_use_of_a_slot_has_an_epoch_of_its_own():
    shelf = Shelf(pages=1)
    epochs = set()
    for _ in range(10):
        row = shelf.take(SLOT)
        epochs.add(shelf.cat.epoch[row])
        shelf.cat.free(row)
    assert len(epochs) == 10


def test_an_older_object_of_another_size_gives_its_page():
    shelf = Shelf()
    big = shelf.add_index(1, 2 * SLOT)
    keys = chain(8)
    shelf.put(keys)
    shelf.put(chain(2, "B"), index=big)
    assert shelf.kept(keys) == keys[:4]
    assert len(big) == 2


def test_a_newer_object_of_another_size_keeps_its_page():
    shelf = Shelf()
    big = shelf.add_index(1, 2 * SLOT)
    shelf.put(chain(2, "B"), index=big)
    shelf.put(chain(4))
    shelf.put(chain(1, "C"), index=big)
    assert shelf.kept(chain(4)) == chain(4)
    assert shelf.kept([*chain(2, "B"), *chain(1, "C")], big) == [chain(1, "B")[0], chain(1, "C")[0]]


def test_an_object_over_several_pages_takes_the_window_that_costs_least():
    shelf = Shelf(pages=3)
    huge = shelf.add_index(1, 2 * PAGE)
    keys = chain(12)
    shelf.put(keys)
    oldest = shelf.rows(keys[8:])  # the chain's end is in the third page
    shelf.cat.remove(oldest[0])
    shelf.cat.remove(shelf.rows(keys[:1])[0])
    shelf.put(chain(1, "H"), index=huge)
    assert shelf.kept(keys) == keys[1:4], "pages 1 and 2 go, page 0 stays"


def test_a_held_neighbour_makes_its_own_size_give_way_instead():
    shelf = Shelf()
    big = shelf.add_index(1, 2 * SLOT)
    keys = chain(4)
    shelf.put(keys)
    shelf.put(chain(2, "B"), index=big)
    shelf.cat.lease(shelf.rows(keys[:1]))
    shelf.put(chain(1, "C"), index=big)
    assert shelf.kept(keys) == keys
    assert len(big) == 2


def test_a_page_that_must_drain_goes_with_its_last_owner():
    """Nothing of the new size is there to give way: the page is emptied but for what is held, then by its release."""
    shelf = Shelf(pages=1)
    keys = chain(4)
    shelf.put(keys)
    held = shelf.rows(keys[2:3])
    shelf.cat.lease(held)
    assert shelf.take(2 * SLOT) is None
    assert shelf.kept(keys) == keys[2:3]
    shelf.cat.release(held)
    assert shelf.kept(keys) == []
    assert shelf.take(2 * SLOT) is not None


def test_an_object_committed_into_a_draining_page_does_not_hold_it():
    shelf = Shelf(pages=1)
    credit = shelf.eviction.take(shelf.index)
    assert credit is not None
    shelf.put(chain(3))
    assert shelf.take(2 * SLOT) is None
    shelf.cat.insert(credit, shelf.index, b"late....", None)
    assert shelf.take(2 * SLOT) is not None


def test_one_slot_that_cannot_be_had_does_not_cost_the_whole_cache():
    shelf = Shelf(pages=32)
    keys = chain(32 * 4)
    shelf.put(keys)
    held = shelf.rows(keys[::4])  # one in every page
    shelf.cat.lease(held)
    for _ in range(100):
        assert shelf.take(PAGE) is None
    assert len(shelf.kept(keys)) >= 7 * len(keys) // 8
    shelf.cat.release(held[1:])
    assert shelf.take(PAGE) is not None


def test_pages_held_for_long_do_not_keep_the_others_from_changing_size():
    shelf = Shelf(pages=32)
    keys = chain(32 * 4)
    shelf.put(keys)
    shelf.cat.lease(shelf.rows(keys[-16 * 4 :: 4]))  # the older half of the pages is held, object by object
    got = sum(shelf.take(PAGE) is not None for _ in range(400))
    assert got == 16


def test_the_oldest_page_is_held_and_the_next_one_gives_way():
    """However many objects stand beside the held one: what can be had is had at once."""
    shelf = Shelf(pages=4, size=SLOT // 4)
    keys = chain(4 * 16)
    shelf.put(keys)
    shelf.cat.lease(shelf.rows([keys[-1], keys[-17]]))  # one in each of the two pages whose objects go first
    assert shelf.take(PAGE) is not None
    assert shelf.kept(keys) == [*keys[:16], *keys[32:48], keys[-1]], "the first is emptied, the second passed over"


def test_an_object_larger_than_what_is_there_so_far_evicts_nothing():
    shelf = Shelf(pages=2)
    shelf.put(chain(8))
    assert shelf.take(3 * PAGE) is None
    assert len(shelf.kept(chain(8))) == 8


def test_an_index_is_forgotten_with_its_last_user_and_object():
    shelf = Shelf()
    shelf.put(chain(1))
    shelf.index.users = 0
    shelf.cat.drop_index_if_idle(shelf.index)
    assert shelf.cat.indexes
    shelf.cat.remove(shelf.rows(chain(1))[0])
    assert not shelf.cat.indexes
    assert shelf.cat.index(NAMESPACE, 0, 8, (PAGE,), PAGE) is not None


@pytest.mark.parametrize(("shards", "key_bytes"), [((2 * SLOT,), 8), ((SLOT,), 9)])
def test_an_index_has_one_geometry(shards: tuple[int, ...], key_bytes: int):
    shelf = Shelf()
    assert shelf.cat.index(NAMESPACE, 0, key_bytes, shards, sum(shards)) is None
    assert shelf.cat.index(NAMESPACE, 0, 8, (SLOT,), SLOT) is shelf.index
    assert shelf.cat.index(NAMESPACE, 1, key_bytes, shards, sum(shards)) is not None
