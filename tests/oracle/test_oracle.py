"""The connector inside of vLLM's own scheduler: any kinds of cache groups, and every byte that a model would read.

No model runs. What it would have computed for a token is known (``oracle_kv``), so what it would read is compared with
it in every step (``oracle_runner``), while requests, engines and managers come and go at random (``oracle_world``).
"""

import importlib.util
import random
from collections import Counter
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM", allow_module_level=True)
from testbed.oracle.oracle_kinds import KINDS, Kind
from testbed.oracle.oracle_kv import WrongBytes
from testbed.oracle.oracle_runner import OracleEngine, Shape, Weather
from testbed.oracle.oracle_world import LONGEST, hits, live, need, rest, surroundings
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import MambaSpec

EVENTS = 200
SEEDS = range(2)
LONG_SEEDS = range(2, 14)


@pytest.fixture(scope="module")
def here() -> Iterator[tuple[Any, Any]]:
    with surroundings() as found:
        yield found


def worlds(here: tuple[Any, Any], kind: Kind, seeds: range, enough: Callable[[Counter[str]], bool]) -> None:
    """Worlds of these seeds, and further ones if they restored too little: a busy machine's manager answers late."""
    base, manager = here
    counts: Counter[str] = Counter()
    for seed in range(seeds.start, seeds.start + 5 * len(seeds)):
        if seed >= seeds.stop and enough(counts):
            break
        if not manager.alive:
            manager.start()
        counts += live(base, kind, seed, manager, EVENTS)
    print(counts)
    assert enough(counts), counts


@pytest.mark.parametrize("name", KINDS)
def test_random_worlds(here: tuple[Any, Any], name: str) -> None:
    worlds(here, KINDS[name], SEEDS, lambda counts: counts["tokens restored"] > 0)


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_more_random_worlds(here: tuple[Any, Any], name: str) -> None:
    groups = range(len(KINDS[name].groups))
    share = 0.01 if name == "chunked" else 0.03  # alone, vLLM takes all before the last chunk for cached, stored or not

    def enough(counts: Counter[str]) -> bool:
        of_each = all(counts[f"restored and read, group {group}"] > 0 for group in groups)
        return of_each and counts["tokens restored"] > share * counts["tokens of prompts"]

    worlds(here, KINDS[name], LONG_SEEDS, enough)


@pytest.mark.parametrize("name", KINDS)
def test_another_engine_finds_what_the_first_would_find_again(here: tuple[Any, Any], name: str) -> None:
    """What vLLM finds in its own, large cache, another engine finds through kvhold; and of each group."""
    base, manager = here
    kind, draw = KINDS[name], random.Random(name)
    text = [[draw.randint(200, 500) for _ in range(LONGEST)] for _ in range(3)]
    prompts = [text[at % 3][: draw.randint(LONGEST // 3, LONGEST)] for at in range(6)]
    prompts += [text[0][: 6 * kind.block_size + more] for more in (-1, 0, 1)]
    counts: Counter[str] = Counter()
    shape = Shape(need(kind, 512) * 12, 512, 8, answer_deadline_ms=5000.0)
    found = []
    for socket in (None, str(manager.socket), str(manager.socket)):
        engine = OracleEngine(base, kind, shape, socket, Weather(random.Random(1)), counts)
        try:
            found.append(hits(engine, prompts))
            if socket is None:
                found.append(hits(engine, prompts))
        finally:
            engine.close()
    cold, again, first, second = found
    lengths = [len(prompt) for prompt in prompts]
    for known, kept in ((cold, first), (again, second)):
        assert [max(pair) for pair in zip(known, kept, strict=True)] == kept, f"less, of prompts of {lengths} tokens"
    for group in range(len(kind.groups)):
        assert counts[f"restored and read, group {group}"] > 0, (group, counts)


@pytest.mark.parametrize("name", ["full", "sliding", "recurrent", "gemma_decode", "llama4", "mamba"])
def test_a_failed_restore_does_not_stop_the_engine(here: tuple[Any, Any], name: str) -> None:
    """Two restores that fill the pool; the first fails, and must be computed although the second has come."""
    base, manager = here
    kind, socket, draw = KINDS[name], str(manager.socket), random.Random(name)
    prompts = [[draw.randint(500, 900) for _ in range(LONGEST)] for _ in range(2)]
    least = need(kind, 64)
    found = {blocks: after_a_failure(base, kind, blocks, socket, prompts) for blocks in range(least, 2 * least, 3)}
    stuck = {blocks: story for blocks, story in found.items() if story}
    assert not stuck, f"in pools of {list(stuck)} blocks; the first: {next(iter(stuck.values()))}"


@pytest.mark.parametrize("name", ["full_dcp2", "mla_indexer_pcp2_dcp4", "mamba_dcp2"])
def test_events_of_ranks_that_share_tokens_name_whole_blocks(here: tuple[Any, Any], name: str) -> None:
    """A router that hears of a block from kvhold knows it as the one that it has heard of from the engine itself."""
    base, manager = here
    told = copy(base)
    told.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    shape = Shape(need(KINDS[name], 512) * 4, 512, 8, answer_deadline_ms=5000.0)
    engine = OracleEngine(told, KINDS[name], shape, str(manager.socket), Weather(random.Random(1)), Counter())
    published: list[Any] = []
    recurrent = [at for at, spec in enumerate(KINDS[name].groups) if isinstance(spec, MambaSpec)]
    try:
        engine.scheduler.kv_event_publisher.publish = lambda batch: published.extend(batch.events)
        hits(engine, [[random.Random(name).randint(500, 900) for _ in range(LONGEST)]])

        def blocks(medium: str) -> dict[Any, tuple[int, ...]]:
            """The tokens of each block that was announced, by group and hash."""
            found = {}
            for event in published:
                if isinstance(event, BlockStored) and event.medium == medium:
                    size, count = event.block_size, len(event.block_hashes)
                    spread = (
                        event.group_idx in recurrent and medium == "GPU"
                    )  # a state's event has all tokens before it
                    assert spread or len(event.token_ids) == size * count, event
                    for at, block in enumerate(event.block_hashes):
                        tokens = event.token_ids[-size:] if spread else event.token_ids[at * size : (at + 1) * size]
                        found[event.group_idx, block] = tuple(tokens)
            return found

        whole = set(range(len(KINDS[name].groups))) - set(recurrent)
        assert rest(engine, lambda: whole <= {group for group, _ in blocks("CPU")})
        theirs, ours = blocks("GPU"), blocks("CPU")
        assert ours == {block: theirs[block] for block in ours}
    finally:
        engine.close()


def after_a_failure(base: Any, kind: Kind, blocks: int, socket: str, prompts: list[list[int]]) -> str:
    """What the engine waits for in the end, or nothing."""
    shape = Shape(200, 512, 8, answer_deadline_ms=5000.0)
    engine = OracleEngine(base, kind, shape, socket, Weather(random.Random(1)), Counter())
    for _ in range(2):  # what is believed to be spoiled is stored anew by whoever misses it
        hits(engine, prompts)
        engine.scheduler.reset_prefix_cache()
    engine.close()
    weather, counts = Weather(random.Random(1), late=1.0, fail=1.0), Counter[str]()
    engine = OracleEngine(base, kind, Shape(blocks, 64, 8, answer_deadline_ms=5000.0), socket, weather, counts)
    try:
        engine.add("fails", prompts[0], 4)
        assert rest(engine, lambda: counts["copies in"] > 0), engine.story()
        weather.fail = 0.0
        engine.add("works", prompts[1], 4)
        rest(engine, lambda: counts["copies in"] > 1, 0.1)  # if there is room for it
        weather.late = 0.0
        if not rest(engine, lambda: not engine.scheduler.has_requests()):
            return engine.story()
        assert counts["restores failed"] == 1
        engine.check_idle()
        return ""
    finally:
        engine.close()


@dataclass
class Given:
    """Blocks that the engine gives to a request, by group; none of them is in its prefix cache."""

    tables: list[list[int]]

    def get_block_ids(self) -> list[list[int]]:
        return self.tables

    get_unhashed_block_ids_all_groups = get_block_ids


def test_a_restore_must_fill_just_the_blocks_that_the_engine_gave(here: tuple[Any, Any]) -> None:
    """A missing destination would leave a block with another request's data; the engine's null block takes nothing."""
    base, manager = here
    kind, prompt = KINDS["mamba"], [random.Random(6).randint(500, 900) for _ in range(6 * 16 + 1)]
    shape = Shape(need(kind, 512) * 2, 512, 8, answer_deadline_ms=5000.0)

    def started() -> OracleEngine:
        return OracleEngine(base, kind, shape, str(manager.socket), Weather(random.Random(1)), Counter())

    engine = started()
    hits(engine, [prompt])
    engine.close()
    engine = started()
    connector = engine.connector

    def copies(states: list[int], attention: list[int]) -> dict[int, list[int]]:
        """What workers are told to copy where, of a restore of tokens 16 to 96 into these blocks."""
        request, found = engine.request(f"r {states} {attention}", prompt, 1), None
        while found is None:
            found, _ = connector.get_num_new_matched_tokens(request, 16)
            if found is None:
                connector.build_connector_meta(SchedulerOutput.make_empty())
        assert found == 80
        connector.update_state_after_alloc(request, Given([states, attention]), found)
        [load] = connector.build_connector_meta(SchedulerOutput.make_empty()).loads
        assert load.request == request.request_id
        connector.request_finished_all_groups(request, (states, attention))
        return {group: blocks for group, blocks, _ in load.copies}

    try:
        state, table = [0, 0, 0, 0, 0, 5], [7, 8, 9, 10, 11, 12]
        assert copies(state, table) == {0: [5], 1: [8, 9, 10, 11, 12]}
        assert copies(state, [7, 8, 0, 10, 11, 12]) == {}, "a null destination"
        assert copies([0] * 6, table) == {}, "a null destination of a state"
        assert copies(state, [7, 8, 9]) == {}, "destinations that are missing"
        assert copies([0, 0, 0, 0, 9, 5], table) == {}, "a block that nothing fills"
    finally:
        engine.close()


# --- would it notice? -------------------------------------------------------------------------------------------


def swapped(arena: Any, parts: Any) -> tuple[Any, ...]:
    """Two blocks of a group are taken for each other."""
    return arena, [(group, [*blocks[:-2], *blocks[:-3:-1]], offsets) for group, blocks, offsets in parts]


def short(arena: Any, parts: Any) -> tuple[Any, ...]:
    """The last block of the last group is forgotten."""
    *most, (group, blocks, offsets) = parts
    return arena, [*most, (group, blocks[:-1], offsets[:-1])]


def null(arena: Any, parts: Any) -> tuple[Any, ...]:
    """The first block goes to the null block."""
    (group, blocks, offsets), *more = parts
    return arena, [(group, [0, *blocks[1:]], offsets), *more]


def shifted(arena: Any, group: int, blocks: Any, offsets: Any) -> tuple[Any, ...]:
    """What is stored is another block than was meant."""
    return arena, group, [max(1, block - 1) for block in blocks], offsets


BUGS: dict[str, dict[str, Any]] = {
    "swapped": {"break_restore": swapped},
    "short": {"break_restore": short},
    "null": {"break_restore": null},
    "shifted": {"break_publish": shifted},
    "not held until copied": {"lie": True},
}


@pytest.mark.parametrize("name", ["full", "mamba_partial"])
@pytest.mark.parametrize("bug", BUGS)
def test_it_would_notice(bug: str, name: str) -> None:
    with surroundings() as (base, manager):  # of its own: what is wrong in there must not be found by others
        for seed in range(12):
            try:
                live(base, KINDS[name], seed, manager, EVENTS, **BUGS[bug])
            except WrongBytes:
                return
    pytest.fail(f"{bug} was not noticed")
