"""What a router is told: exactly what kvhold could restore for this engine, in order, as it happens."""

import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from testbed.engine.bed import LLM, drain, generate, prompt, scheduler, settle, step
from testbed.engine.families import FAMILIES, weights
from testbed.engine.fuzz import drive, requests
from testbed.engine.kvhold_bed import attached, scheduler_side, serving, until
from testbed.process.manager_process import Manager
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

import kvhold.engines.common.adapters as adapters_module
import kvhold.engines.common.spaces as spaces_module
import kvhold.engines.vllm.events as events_module
from engine.test_identity import LORA, ask, ready, write_adapter
from engine.test_identity import tokens as as_inputs
from kvhold import protocol as wire
from kvhold.client.channel import Channel
from kvhold.engines.common import announcements

GROUPED = ("gemma3", "granite_partial")
EVENTS = {"kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null")}


class Cleared(AllBlocksCleared):
    """One of ours: the engine's own look alike."""


class Router:
    """Believes what it is told, and nothing else: the tokens of each block, by group."""

    def __init__(self, llm: LLM, patch: pytest.MonkeyPatch) -> None:
        self.blocks: dict[tuple[int, Any], tuple[int, ...]] = {}
        self.parents: dict[tuple[int, Any], Any] = {}
        self.events: list[Any] = []
        patch.setattr(scheduler(llm).kv_event_publisher, "publish", self._publish)

    def _publish(self, batch: Any) -> None:
        for event in batch.events:
            if isinstance(event, Cleared):
                self.blocks.clear()
            if isinstance(event, AllBlocksCleared):
                self.events.append(event)  # also of the engine's own cache, which is none of this router's business
            elif event.medium == "CPU":
                self.events.append(event)
                self._take(event)

    def _take(self, event: Any) -> None:
        assert event.locality == "LOCAL"
        if isinstance(event, BlockStored):
            parent, size = event.parent_block_hash, event.block_size
            for number, key in enumerate(event.block_hashes):
                assert (event.group_idx, key) not in self.blocks, "announced twice"
                tokens = event.token_ids[number * size : (number + 1) * size]
                self.blocks[event.group_idx, key] = tuple(tokens)
                self.parents[event.group_idx, key] = parent
                parent = key
        else:
            assert isinstance(event, BlockRemoved)
            for key in event.block_hashes:
                del self.blocks[event.group_idx, key]


def keys_of(socket: Path, llm: LLM) -> set[tuple[int, Any]]:
    """All that the manager has for this engine, by group, as events name it."""
    half, found = scheduler_side(llm), set()
    channel = Channel(socket, wire.Hello("admin"), 20)
    assert half._spaces.ranks is not None
    name = half._spaces.namespace(half._spaces.ranks)
    for group in half._groups:
        cursor = 0
        while True:
            channel.send(wire.List(name, group.index, cursor))
            answers: list[Any] = []
            while not answers:
                answers = channel.receive(20)
            keys, cursor = answers[0].keys, answers[0].cursor
            found |= {(group.index, maybe_convert_block_hash(keys[i : i + 32])) for i in range(0, len(keys), 32)}
            if not cursor:
                break
    channel.close()
    return found


@contextmanager
def routed(folder: Path, manager: Manager, patch: pytest.MonkeyPatch, **options: Any) -> Iterator[tuple[LLM, Router]]:
    with serving(folder, manager, **EVENTS, **options) as llm:
        yield llm, Router(llm, patch)


def told(llm: LLM) -> None:
    """Let the engine do what it does of its own accord before it idles."""
    settle(llm)


def withdrawn(llm: LLM, router: Router) -> bool:
    generate(llm, [prompt(3, 999)], 1)  # an engine hears of it in its next step
    return not router.blocks


def purge(manager: Manager) -> None:
    channel = Channel(manager.socket, wire.Hello("admin"), 20)
    channel.send(wire.Purge())
    until(lambda: any(isinstance(m, wire.Purged) for m in channel.receive(1)), "the purge is over")
    channel.close()


def test_what_is_announced_is_what_is_stored(
    llama_dir: Path, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(200, 1)
    with routed(llama_dir, manager, monkeypatch) as (llm, router):
        generate(llm, [tokens])
        told(llm)
        assert set(router.blocks) == keys_of(manager.socket, llm)
        assert sorted(router.blocks.values()) == sorted(tuple(tokens[at : at + 32]) for at in range(0, 192, 32))
        first = next(key for key, block in router.blocks.items() if block == tuple(tokens[:32]))
        assert router.parents[first] is None
        assert [len(event.block_hashes) for event in router.events] == [6], "a chain is one event"
        generate(llm, [prompt(200, 1)[:96] + prompt(100, 2)])  # three blocks of it are there
        told(llm)
        assert set(router.blocks) == keys_of(manager.socket, llm)
        assert len(router.blocks) == 6 + 3


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.name in GROUPED], ids=lambda family: family.name)
def test_every_group_is_announced(
    tmp_path: Path, manager: Manager, monkeypatch: pytest.MonkeyPatch, family: Any
) -> None:
    with weights(), routed(family.write(tmp_path), manager, monkeypatch, **family.options) as (llm, router):
        generate(llm, [prompt(201, 1)])
        told(llm)
        assert set(router.blocks) == keys_of(manager.socket, llm)
        half = scheduler_side(llm)
        assert {group for group, _ in router.blocks} == {group.index for group in half._groups}
        kinds = {event.group_idx: event.kv_cache_spec_kind for event in router.events}
        assert len(set(kinds.values())) == 2, kinds


def test_removals_are_pushed(llama_dir: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = Manager(short_folder, dram="2MiB")
    try:
        with routed(llama_dir, manager, monkeypatch, credits=4) as (llm, router):
            for seed in range(12):
                generate(llm, [prompt(400, seed)])
            told(llm)
            generate(llm, [prompt(3, 999)], 1)  # a step takes in what came while it idled
            assert any(isinstance(event, BlockRemoved) for event in router.events)
            assert set(router.blocks) == keys_of(manager.socket, llm)
    finally:
        manager.kill()


def test_a_purge_and_a_reset_clear(llama_dir: Path, manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    with routed(llama_dir, manager, monkeypatch) as (llm, router):
        generate(llm, [prompt(200, 1)])
        told(llm)
        assert len(router.blocks) == 6
        purge(manager)
        until(lambda: withdrawn(llm, router), "the router is told")
        generate(llm, [prompt(200, 2)])
        told(llm)
        assert len(router.blocks) == 6
        cleared = sum(isinstance(event, AllBlocksCleared) for event in router.events)
        assert llm.reset_prefix_cache(reset_connector=True)
        generate(llm, [prompt(3, 999)], 1)
        assert sum(isinstance(event, AllBlocksCleared) for event in router.events) == cleared + 2  # theirs, ours
        router.blocks.clear()
        generate(llm, [prompt(200, 2)])
        told(llm)
        assert set(router.blocks) == keys_of(manager.socket, llm)
        assert len(router.blocks) == 6


def test_after_a_gap_what_is_gone_is_withdrawn(
    llama_dir: Path, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcements, "_SLICE", 2)
    with routed(llama_dir, manager, monkeypatch) as (llm, router):
        generate(llm, [prompt(200, 1)])
        told(llm)
        assert len(router.blocks) == 6
        manager.restart()  # without an SSD nothing is left
        until(lambda: attached(llm), "attached again")
        generate(llm, [prompt(200, 3)])
        told(llm)
        for _ in range(3):
            step(llm)
        generate(llm, [prompt(3, 999)], 1)
        drain(llm)
        assert set(router.blocks) == keys_of(manager.socket, llm)
        assert prompt(200, 3)[:32] == list(next(iter(router.blocks.values())))


@pytest.mark.parametrize(
    "family", [f for f in FAMILIES if f.name in ("mistral", *GROUPED)], ids=lambda family: family.name
)
def test_what_others_stored_is_announced_once_it_is_restored(
    tmp_path: Path, manager: Manager, monkeypatch: pytest.MonkeyPatch, family: Any
) -> None:
    """For example what this engine's predecessor has stored: of a block one must know the tokens to announce it."""
    tokens = prompt(201, 1)
    with weights():
        folder = family.write(tmp_path)
        with routed(folder, manager, monkeypatch, **family.options) as (llm, router):
            generate(llm, [tokens])
            told(llm)
            stored = router.blocks
        with routed(folder, manager, monkeypatch, **family.options) as (llm, router):
            for _ in range(2):
                assert generate(llm, [tokens])[0].cached > 0
                told(llm)
                assert llm.reset_prefix_cache()
            assert router.blocks
            assert set(router.blocks.items()) <= set(stored.items())
            purge(manager)
            until(lambda: withdrawn(llm, router), "the router is told")


def test_what_goes_while_it_is_restored_is_not_announced(
    llama_dir: Path, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(llama_dir, manager) as llm:
        generate(llm, [prompt(200, 1)])
        settle(llm)
    with routed(llama_dir, manager, monkeypatch) as (llm, router):
        events = scheduler_side(llm).events
        assert events is not None
        restored = events.restored

        def purged(*args: Any) -> None:
            restored(*args)
            purge(manager)

        monkeypatch.setattr(events, "restored", purged)
        generate(llm, [prompt(200, 1)])
        told(llm)
        generate(llm, [prompt(3, 999)], 1)
        assert not router.blocks


def test_adapters_are_announced_as_long_as_they_are_spoken_of(
    llama_dir: Path, tmp_path: Path, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spaces_module, "_MOST_ADAPTERS", 1)
    one, other = (LoRARequest(f"a{at}", at, str(write_adapter(tmp_path / f"a{at}", at))) for at in (1, 2))
    monkeypatch.setattr(adapters_module, "CLOCK_SECONDS", 0.0)
    with routed(llama_dir, manager, monkeypatch, **LORA) as (llm, router):

        def ask_for(adapter: LoRARequest) -> int:
            [output] = ask(llm, as_inputs([prompt(200, 1)]), adapter)
            told(llm)
            assert llm.reset_prefix_cache()
            return output.cached

        def lora_names() -> set[Any]:
            return {event.lora_name for event in router.events if isinstance(event, BlockStored)}

        ready(llm, one)
        told(llm)
        before = len(router.blocks)
        assert ask_for(one) == 0
        assert len(router.blocks) == before + 6
        assert lora_names() == {"a1"}
        ready(llm, other)
        told(llm)
        assert lora_names() == {"a1", "a2"}
        assert len(router.blocks) == 1, "nobody speaks of the first any more"
        assert ask_for(one) == 192
        assert sorted(router.blocks.values()) == sorted(tuple(prompt(200, 1)[at : at + 32]) for at in range(0, 192, 32))
        purge(manager)
        until(lambda: withdrawn(llm, router), "the router is told")
        generate(llm, [prompt(200, 1)])
        told(llm)
        assert lora_names() == {"a1", "a2", None}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 20))])
def test_at_random(tmp_path: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Too little DRAM, lost managers, resets: what is announced in the end is there, and was the same all the time."""
    rng = random.Random(seed)
    monkeypatch.setattr(events_module, "AllBlocksCleared", Cleared)
    manager = Manager(short_folder, dram="2MiB")
    options = {"max_num_batched_tokens": 96, "max_num_seqs": 6, "max_model_len": 256, "num_gpu_blocks_override": 44}
    family = next(f for f in FAMILIES if f.name == ("mistral" if seed % 2 else "gemma3"))
    try:
        with weights(), routed(family.write(tmp_path), manager, monkeypatch, credits=1, **options) as (llm, router):
            prompts, limits = requests(rng, 60, 20, 180, 50, 8)
            drive(llm, manager, monkeypatch, rng, prompts, limits, faults=seed % 3 == 1)
            until(lambda: attached(llm), "attached at the end")

            def right() -> bool:
                generate(llm, [prompt(3, 999)], 1)
                told(llm)
                return set(router.blocks) <= keys_of(manager.socket, llm)

            until(right, "nothing is announced that is not there")
            announced = [event for event in router.events if isinstance(event, BlockStored)]
            tokens: dict[Any, set[tuple[int, ...]]] = defaultdict(set)
            for event in announced:
                for number, key in enumerate(event.block_hashes):
                    size = event.block_size
                    tokens[event.group_idx, key].add(tuple(event.token_ids[number * size : (number + 1) * size]))
            assert all(len(found) == 1 for found in tokens.values())
            assert seed or (tokens and any(isinstance(event, BlockRemoved) for event in router.events))
    finally:
        manager.kill()
