"""A publishing half alone: stand-ins for the session, the block pool, the engine's steps and its cache managers."""

from array import array
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvhold.client.control import Slots
from kvhold.engines.common.accounts import Accounts
from kvhold.engines.common.batches import Batches
from kvhold.engines.common.groups import Group
from kvhold.engines.common.plans import CopyReport, Publish
from kvhold.engines.vllm.publishing import Publishing
from kvhold.engines.vllm.retention import Retention

FULL = Group(0, "full attention", 16, handed=False, whole=True, window=0)
WIDE = Group(1, "full attention", 64, handed=False, whole=True, window=0)
STATES = Group(1, "Mamba", 16, handed=True, whole=False, window=0)


def keys(count: int, first: int = 1) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in range(first, first + count)]


def attention(block_size: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.float32)


class Block(int):
    """A block of the engine's pool, by number."""

    block_hash: bytes | None = None


class Storing:
    """A :class:`Publishing` over ``groups`` with hashes of 16 tokens; each rank's copy has 4096 bytes."""

    def __init__(self, *groups: Group, decode: bool = False, slots: int = 100, stored: Any = ()) -> None:
        self.touched: list[int] = []
        self.freed: list[int] = []
        self.told: list[tuple[Any, ...]] = []
        credit = {number: granted(slots) for number in range(len(groups))}
        self.control: Any = SimpleNamespace(
            attachment=1,
            silent=False,
            credit=credit,
            commit=lambda space, parent, depth, keys, *_: self.told.append(("commit", space, depth, *keys)),
            give_back=lambda space, taken: self.told.append(("back", space, len(taken))),
        )
        spaces = tuple(range(len(groups)))
        self.accounts = Accounts()
        self.batches = Batches(self.control, self.accounts, SimpleNamespace(sure=lambda *_: True))  # type: ignore
        where: Any = SimpleNamespace(to_store=lambda _: spaces)
        asked: Any = SimpleNamespace(stored=lambda _: stored)
        self.publishing = Publishing(self.control, self.batches, where, asked, None, decode, True)
        self.blocks = [Block(number) for number in range(1000)]
        for block in self.blocks:
            block.block_hash = b"%d" % block
        pool: Any = SimpleNamespace(
            num_gpu_blocks=1000, blocks=self.blocks, touch=self.touched.extend, free_blocks=self.freed.extend
        )
        retention = object.__new__(Retention)
        retention.groups, retention.by_index = groups, {group.index: at for at, group in enumerate(groups)}
        retention.hash_tokens, retention._caching = 16, False
        # which blocks the engine would find itself: all that it hands over, but for those of a pass that is over
        self.outdated: set[int] = set()
        cached = SimpleNamespace(contain=lambda _, block: block not in self.outdated)
        engine_pool = SimpleNamespace(cached_block_hash_to_block=cached)
        self.checkpoints: dict[str, tuple[int, int]] = {}
        manager = SimpleNamespace(use_eagle=False, block_pool=engine_pool, _checkpoints=self.checkpoints)
        retention._managers = [manager] * len(groups)
        retention._coordinator = SimpleNamespace(num_reprefillable_tokens=0)  # type: ignore[assignment]
        self.publishing.bind(pool, retention)
        self.expected = [{0: 4096, 1: 4096}] * len(groups)

    def request(self, name: str = "r", prompt: int = 96, first: int = 1, hashes: int | None = None) -> Any:
        request = SimpleNamespace(
            request_id=name,
            block_hashes=keys(prompt // 16 if hashes is None else hashes, first),
            num_prompt_tokens=prompt,
            num_tokens=prompt,
            num_computed_tokens=0,
            num_in_flight_tokens=0,
            lora_request=None,
        )
        self.publishing.admit(request)  # type: ignore[arg-type]
        return request

    def step(
        self,
        request: Any,
        tokens: int,
        *tables: Sequence[int],
        handed: Iterable[tuple[int, int, int]] = (),
        preempted: bool = False,
        finished: bool = False,
    ) -> list[Publish]:
        """A step that computes ``tokens`` of ``request``."""
        name = request.request_id
        state = SimpleNamespace(
            get_block_ids=lambda asked: tables if asked == name else None,
            boundary_state_offloads={name: list(handed)} if handed else {},
        )
        output: Any = SimpleNamespace(
            num_scheduled_tokens={name: tokens} if tokens else {},
            kv_connector_block_state=state,
            preempted_req_ids={name} if preempted else None,
            finished_req_ids={name} if finished else set(),
        )
        plans: list[Publish] = []
        self.publishing.plan(output, plans)
        request.num_computed_tokens += tokens
        return plans

    @property
    def holding(self) -> bool:
        return self.batches.holding or self.publishing.awaiting

    def end(self, batch: int, *ranks: int, size: int = 4096) -> None:
        self.batches.ended(CopyReport({batch: dict.fromkeys(ranks, size)}), self.expected)


def granted(count: int) -> Slots:
    return Slots(array("I", range(count)), array("Q", range(count)), array("Q", [1] * count))


def blocks(plans: list[Publish]) -> list[tuple[int, list[int]]]:
    return [(plan.group, plan.blocks) for plan in plans]
