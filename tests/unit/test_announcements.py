"""What routers are told of what an engine restores: only what its own host has."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvhold.client.control import QuestionId
from kvhold.engines.common.announcements import Announcements, Published
from kvhold.engines.common.question import LeasedBlocks
from kvhold.protocol import Tier


class Asked:
    """A session of which the answers are given."""

    attachment, silent, watcher = 1, False, None
    tiers: bytes | None = None

    def look(self, keys: Any) -> QuestionId:
        return QuestionId(1, 1, 1, 0.0)

    def residency(self, _: QuestionId) -> tuple[bytes, ...] | None:
        return None if self.tiers is None else (self.tiers,)

    def release(self, _: Any) -> None:
        pass


class Told(Announcements[str]):
    def __init__(self, control: Any) -> None:
        super().__init__(control, [SimpleNamespace(block_tokens=16, handed=False)])  # type: ignore[list-item]
        self.stored_keys: list[bytes] = []
        self.removed_keys: list[bytes] = []

    def _say_stored(self, at: int, key: bytes, published: Published[str]) -> None:
        self.stored_keys.append(key)

    def _say_removed(self, at: int, keys: Sequence[bytes]) -> None:
        self.removed_keys += keys

    def _say_cleared(self) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("tier", "here"), [(Tier.DRAM, True), (Tier.BACKING, True), (Tier.ELSEWHERE, False), (Tier.NOWHERE, False)]
)
def test_what_was_restored_is_announced_if_this_host_still_has_it(tier: int, here: bool) -> None:
    asked = Asked()
    told = Told(asked)
    told.begun([1])
    told.restored("r", [1], [LeasedBlocks(0, [0], [0])], 16, lambda _, end: b"%d" % end)  # type: ignore[arg-type]
    asked.tiers = bytes([tier])
    told.go_on()
    assert told.stored_keys == ([b"16"] if here else [])
    if here:  # another session: what was announced is asked about
        asked.tiers = None
        told.begun([1])
        asked.tiers = bytes([Tier.ELSEWHERE])
        told.go_on()
        told.go_on()
        assert told.removed_keys == [b"16"]
