"""Beside another connector in vLLM's ``MultiConnector``: both work, whichever is first, and each without the other."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from testbed.engine.bed import LLM, add, drain, generate, prompt, reference, running, scheduler, settle
from testbed.engine.engine_process import EngineProcess, packed
from testbed.engine.kvhold_bed import connect, counting, scheduler_side, status, until, warm_up
from testbed.engine.siblings import HANDSHAKING, NIXL, Handshaking, beside, example
from testbed.process.manager_process import Manager
from testbed.process.ports import free_port
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored

from kvhold.copy.host import HostCopier

TOKENS = prompt(333, 1)
BLOCKS = len(TOKENS) // 32
orders = pytest.mark.parametrize("first", [True, False], ids=["kvhold first", "kvhold second"])


@contextmanager
def together(model: Path, manager: Manager, sibling: dict[str, Any], first: bool, **options: Any) -> Iterator[LLM]:
    config = beside(sibling, connect(manager), first=first)
    with running(model, connector=None, kv_transfer_config=config, **options) as llm:
        warm_up(llm)
        yield llm


def neighbour(llm: LLM) -> Handshaking:
    [child] = [one for one in scheduler(llm).connector.sub_connectors if isinstance(one, Handshaking)]
    return child


@orders
@pytest.mark.parametrize("kind", ["handshaking", "example"])
def test_it_stores_and_restores_beside_a_sibling(
    llama_dir: Path, manager: Manager, tmp_path: Path, kind: str, first: bool
) -> None:
    """The second engine's sibling has nothing: what it restores is kvhold's."""
    expected = reference(llama_dir, [TOKENS])
    options = {"disable_hybrid_kv_cache_manager": True} if kind == "example" else {}
    for engine, hit in enumerate((0, len(TOKENS) // 32 * 32)):
        sibling = HANDSHAKING if kind == "handshaking" else example(tmp_path / str(engine))
        with together(llama_dir, manager, sibling, first, **options) as llm, counting() as counts:
            outputs = generate(llm, [TOKENS])
            settle(llm)
            assert outputs == expected
            assert [output.cached for output in outputs] == [hit]
            assert (counts["tokens_hit"], counts["loads"], counts["load_failures"]) == (hit, bool(hit), 0)
            assert counts["blocks_published"] == (0 if hit else BLOCKS)


@orders
def test_each_has_its_own_handshake_reports_stats_and_events(llama_dir: Path, manager: Manager, first: bool) -> None:
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    options = {"kv_events_config": events, "disable_log_stats": False}
    with together(llama_dir, manager, HANDSHAKING, first, **options) as llm:
        assert [payload.agent for payload in neighbour(llm).shaken] == ["agent"]
        told: list[Any] = []
        take = scheduler(llm).connector.take_events

        def taken() -> list[Any]:
            events = list(take())
            told.extend(events)
            return events

        scheduler(llm).connector.take_events = taken
        generate(llm, [TOKENS])
        until(lambda: settle(llm) is not None and len([e for e in told if isinstance(e, BlockStored)]), "it is told")
        assert sum(len(event.block_hashes) for event in told if isinstance(event, BlockStored)) == BLOCKS
        assert [event.medium for event in told if isinstance(event, BlockRemoved)][-1] == "elsewhere"
        assert llm.reset_prefix_cache()
        generate(llm, [TOKENS])
        assert neighbour(llm).reported > 0
        counted = {
            (sample.name, sample.labels.get("engine")): sample.value
            for family in REGISTRY.collect()
            for sample in family.samples
        }
        assert counted["kvhold:tokens_hit_total", "0"] == len(TOKENS) // 32 * 32
        assert counted["vllm:sibling_steps_total", "0"] > 0
        assert scheduler_side(llm).accounts.data == {}


@orders
def test_a_sibling_that_fails_and_a_manager_that_ends_leave_the_other_one_working(
    llama_dir: Path, manager: Manager, first: bool
) -> None:
    other = prompt(333, 2)
    expected = reference(llama_dir, [TOKENS, other])
    with together(llama_dir, manager, HANDSHAKING, first) as llm, counting() as counts:
        add(llm, "failed", TOKENS, transfer={"fail": 64})  # by the policy that kvhold needs it is computed
        assert drain(llm)["failed"] == expected[0]
        settle(llm)
        assert llm.reset_prefix_cache()
        outputs = generate(llm, [TOKENS])
        assert outputs == expected[:1]
        assert outputs[0].cached == counts["tokens_hit"] == len(TOKENS) // 32 * 32
        manager.kill()
        add(llm, "failed", other, transfer={"fail": 64})
        add(llm, "plain", TOKENS)
        assert drain(llm) == {"failed": expected[1], "plain": expected[0]}
        assert neighbour(llm).reported > 0
        assert counts["load_failures"] == 0


@orders
def test_a_restore_that_fails_fails_no_request_under_vllms_default_policy(
    llama_dir: Path, manager: Manager, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """Without a sibling: tests/engine/test_partial_failures.py, where nothing sets the policy either."""
    expected = reference(llama_dir, [TOKENS])
    with together(llama_dir, manager, HANDSHAKING, first) as llm, counting() as counts:
        generate(llm, [TOKENS])
        settle(llm)
        assert llm.reset_prefix_cache()

        def failing(*args: Any) -> None:
            raise OSError("injected")

        monkeypatch.setattr(HostCopier, "restore", failing)
        assert generate(llm, [TOKENS]) == expected
        assert counts["load_failures"] == 1


# The real NIXL connector. Its package has 250 MB, so CI does without; `pip install nixl` and these tests run.

nixl = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="needs NIXL: pip install nixl")


@contextmanager
def with_nixl(model: Path, manager: Manager, first: bool) -> Iterator[EngineProcess]:
    config = asdict(beside(NIXL, connect(manager), first=first))
    environment = {
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "UCX_TLS": "tcp",
        "UCX_NET_DEVICES": "lo",
    }
    engine = EngineProcess(model, environment=environment, connector=None, kv_transfer_config=config)
    try:
        yield engine
    finally:
        engine.kill()


@nixl
@orders
def test_nixl_moves_a_prompt_from_engine_to_engine_and_kvhold_keeps_it(
    llama_dir: Path, manager: Manager, short_folder: Path, first: bool
) -> None:
    """One engine computes a prompt for the other; each has a manager of its own, so that only NIXL can bring it."""
    prompts = [TOKENS, *(prompt(333, seed) for seed in (2, 3, 4))]
    expected = [packed(output) for output in reference(llama_dir, prompts)]
    theirs = Manager(short_folder, dram="64MiB")
    whole = len(TOKENS) // 32 * 32

    def check(output: dict[str, Any], truth: dict[str, Any]) -> None:
        assert (output["tokens"], output["logprobs"]) == (truth["tokens"], truth["logprobs"])

    try:
        with with_nixl(llama_dir, manager, first) as computes, with_nixl(llama_dir, theirs, not first) as decodes:
            computes.ready(), decodes.ready()
            told = computes.transfer(TOKENS, 1, {"do_remote_decode": True})
            assert told["params"]["do_remote_prefill"]
            brought = decodes.transfer(TOKENS, 8, told["params"])
            check(brought, expected[0])
            assert status(theirs.socket)["objects"] == BLOCKS, "what NIXL brought is kept like what is computed"
            # Each of them keeps prompts, with or without the other one.
            for engine, mine in ((computes, manager), (decodes, theirs)):
                check(engine.generate([prompts[1]])[0], expected[1])
                assert engine.ask({"reset": True})["reset"]
                [again] = engine.generate([prompts[1]])
                check(again, expected[1])
                assert again["cached"] == whole
                assert status(mine.socket)["objects"] >= BLOCKS
            # NIXL goes on without a manager, kvhold without the other engine.
            theirs.kill()
            told = computes.transfer(prompts[2], 1, {"do_remote_decode": True})
            check(decodes.transfer(prompts[2], 8, told["params"]), expected[2])
            theirs.start()
            gone = computes.transfer(prompts[3], 1, {"do_remote_decode": True})["params"]
            computes.kill()
            gone |= {"remote_engine_id": "gone", "remote_port": free_port()}
            check(decodes.transfer(prompts[3], 8, gone), expected[3])
    finally:
        theirs.kill()
