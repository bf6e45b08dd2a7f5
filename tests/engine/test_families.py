"""Every kind of cache group, on one small model of each family that the CPU engine runs.

Whatever of a prompt is restored, the output is that of the engine after the same hit in its own cache, to the last bit;
hits reach as far as those of that cache would, had it kept everything.
"""

import math
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from testbed.engine.bed import (
    LLM,
    Output,
    Tokens,
    abort,
    add,
    block_ids,
    drain,
    generate,
    prompt,
    scheduler,
    settle,
    step,
)
from testbed.engine.engine_process import EngineProcess
from testbed.engine.families import FAMILIES, LONG_FAMILIES, Bench, apart, differing, weights
from testbed.engine.kvhold_bed import connect, flip_byte, status, until
from testbed.engine.models import write_gemma3
from testbed.process.manager_process import Manager

from kvhold.copy.host import HostCopier


@pytest.fixture(
    scope="module",
    params=[*FAMILIES, *(pytest.param(family, marks=pytest.mark.long) for family in LONG_FAMILIES)],
    ids=lambda family: family.name,
)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with weights(), tempfile.TemporaryDirectory(prefix="kvhold-") as folder:
        manager = Manager(Path(folder))
        bench = Bench(request.param, tmp_path_factory.mktemp("families"), manager)
        try:
            yield bench
        finally:
            try:
                bench.close()
            finally:
                print(manager.log_tail())
                manager.kill()


def one_by_one(llm: LLM, prompts: Sequence[Tokens], max_tokens: int = 8) -> list[Output]:
    return [generate(llm, [tokens], max_tokens)[0] for tokens in prompts]


# With kvhold


def test_restored(bench: Bench) -> None:
    """After a reset, and by the next engine."""
    prompts = [prompt(bench.unit * 5 + 13 * i, 10 + i) for i in range(3)]
    own, noise = bench.own(prompts * 2), bench.noise
    cold, resumed = own[:3], own[3:]
    assert [output.cached for output in cold] == [0, 0, 0]
    assert all(output.cached for output in resumed)
    assert not differing(resumed, cold, noise)
    llm = bench.engine()
    assert bench.equals_own(one_by_one(llm, prompts), cold)
    bench.forget()
    assert bench.equals_own(one_by_one(llm, prompts), resumed)
    bench.check_nothing_held()
    bench.close()
    assert bench.equals_own(one_by_one(bench.engine(), prompts), resumed)
    bench.check_nothing_held()


def test_each_object_counts(bench: Bench) -> None:
    """A damaged byte shows in the output if the object is one that the hit needs, and in no other case.

    Damage to all that a hit needs shows however much answers may differ elsewhere in these tests.
    """
    tokens = prompt(max(bench.unit, 32) * 5 + 1, 20)
    [cold, resumed], noise = bench.own([tokens] * 2), bench.noise
    needed = blocks_read(bench, tokens)
    llm = bench.engine()
    with recording_objects() as objects:
        assert bench.equals_own(generate(llm, [tokens]), [cold])
        settle(llm)
    bench.forget()
    [whole] = generate(llm, [tokens])
    assert bench.equals_own([whole], [resumed])
    bench.forget()
    for group, offsets in objects.items():
        felt = 0
        for offset in offsets:
            with damaged(llm, group, [offset]):
                [output] = generate(llm, [tokens])
                bench.forget()
            assert output.cached
            felt += output.logprobs != whole.logprobs
        assert felt == needed[group], (group, len(offsets))
    with ExitStack() as all_of_it:
        for group, offsets in objects.items():
            all_of_it.enter_context(damaged(llm, group, offsets))
        assert differing(generate(llm, [tokens]), [whole], noise)
        bench.forget()
    assert generate(llm, [tokens]) == [whole]


def blocks_read(bench: Bench, tokens: Tokens) -> list[int]:
    """How many blocks of each cache group the engine itself reads when it finds all it can of ``tokens``."""
    if not bench.caches_itself:
        return [(len(tokens) - 1) // bench.unit]
    llm = bench.alone()
    generate(llm, [tokens])
    internal = add(llm, "again", tokens)
    step(llm)
    tables = block_ids(llm, internal)
    output = drain(llm)["again"]
    sizes = [group.kv_cache_spec.block_size for group in scheduler(llm).kv_cache_config.kv_cache_groups]
    return [sum(map(bool, table[: -(-output.cached // size)])) for table, size in zip(tables, sizes, strict=True)]


@contextmanager
def damaged(llm: LLM, group: int, offsets: Sequence[int]) -> Iterator[None]:
    """Objects of a group, by their places in the arena, with another sign of many of their numbers."""
    size = smallest(llm, group)
    places = [place for offset in offsets for place in range(offset + 7, offset + size, 1024)]
    for place in places:
        flip_byte(place)
    yield
    for place in places:
        flip_byte(place)


def smallest(llm: LLM, group: int) -> int:
    """Bytes of the first layer's content in a block: states of recurrent layers are padded."""
    spec = scheduler(llm).kv_cache_config.kv_cache_groups[group].kv_cache_spec
    shapes, dtypes = getattr(spec, "shapes", None), getattr(spec, "dtypes", None)
    if shapes is None:
        return spec.page_size_bytes
    return sum(dtype.itemsize * math.prod(shape) for shape, dtype in zip(shapes, dtypes, strict=True))


@contextmanager
def recording_objects() -> Iterator[dict[int, list[int]]]:
    """Arena offsets, by cache group, of the objects published while this is open."""
    seen: dict[int, list[int]] = {}
    begin = HostCopier.begin_publish

    def also(copier: HostCopier, arena: Any, group: int, blocks: Any, offsets: Any) -> Any:
        seen.setdefault(group, []).extend(offsets)
        return begin(copier, arena, group, blocks, offsets)

    with patch.object(HostCopier, "begin_publish", also):
        yield seen


def probes(bench: Bench, seed: int) -> tuple[Tokens, list[Tokens], list[Tokens]]:
    """A prompt; prompts that are its beginning and end around every boundary; prompts that fork from it there."""
    unit = bench.unit
    units = 7 if "prefix_match_unit" in bench.family.options else 5 if unit <= 32 else 3
    stored = prompt(unit * units + 5, seed)
    ends = [unit * k + d for k in range(units + 1) for d in (-1, 0, 1) if unit * k + d >= 0]
    forks = [stored[:end] + prompt(20 + end % 3 * unit, seed + 1 + end) for end in ends]
    return stored, [stored[:end] for end in ends if end], forks


def test_hits_at_every_boundary(bench: Bench) -> None:
    """Each restored from kvhold alone."""
    stored, ends, forks = probes(bench, 1000)
    rng = random.Random(0)
    rng.shuffle(ends)
    rng.shuffle(forks)
    prompts = [stored, *ends, *forks, stored]
    own = bench.own(prompts, 2)
    llm = bench.engine()
    outputs = []
    for tokens in prompts:
        outputs += generate(llm, [tokens], 2)
        bench.forget()
    short = [(len(p), o.cached, r.cached) for p, o, r in zip(prompts, outputs, own, strict=True) if o.cached < r.cached]
    assert not short, "(prompt, found, what the engine itself finds)"
    assert bench.equals_own(outputs, own)
    bench.check_nothing_held()


def test_hits_in_part_local(bench: Bench) -> None:
    """The engine's own cache has the beginning of some of the prompts, kvhold what follows.

    The two may come from different steps, which an engine that forgets nothing does not have; hence the noise.
    """
    stored, ends, forks = probes(bench, 2000)
    rng = random.Random(1)
    others = rng.sample([*ends, *forks], 20)
    begun = [tokens[: rng.randrange(1, len(tokens))] for tokens in others[:8]]
    again = [stored, *others]
    forgetful = [rng.random() < 0.3 for _ in again]
    prompts = [stored, *(tokens for beginning in begun for tokens in (beginning, stored)), *again]
    own, noise = bench.own(prompts, 2), bench.noise
    llm = bench.engine()
    outputs = generate(llm, [stored], 2)
    for beginning in begun:
        bench.forget()
        outputs += [*generate(llm, [beginning], 2), *generate(llm, [stored], 2)]
    for tokens, forgets in zip(again, forgetful, strict=True):
        if forgets:
            bench.forget()
        outputs += generate(llm, [tokens], 2)
    assert not differing(outputs, own, noise)
    assert [output.cached for output in outputs] == [output.cached for output in own]
    bench.check_nothing_held()


def test_batch_of_hits_and_misses(bench: Bench) -> None:
    unit = bench.unit
    shared = prompt(unit * 3 + 7, 30)
    stored = [shared, prompt(unit * 4, 31), prompt(unit * 2 + 1, 32)]
    new = [shared[: unit * 2 + 3] + prompt(50, 33), prompt(90, 34), shared + prompt(70, 35), prompt(unit * 3, 36)]
    prompts = [new[0], stored[1], new[1], stored[0], new[2], stored[2], new[3]]
    expected, noise = bench.truth([*stored, *prompts]), bench.noise
    llm = bench.engine()
    assert one_by_one(llm, stored) == expected[:3]
    for _ in range(2):
        bench.forget()
        together = generate(llm, prompts)
        assert not differing(together, expected[3:], noise)
        assert [bool(o.cached) for o, p in zip(together, prompts, strict=True) if p in stored] == [True] * 3
        assert status(bench.manager.socket)["accounts"]["leased"] == 0
    assert all(output.cached for output in together)
    bench.check_nothing_held()


@pytest.mark.parametrize("steps", range(4))
def test_abort_during_a_load(bench: Bench, steps: int) -> None:
    prompts = [prompt(bench.unit * 3 + 5, 40 + i) for i in range(3)]
    expected, noise = bench.truth(prompts), bench.noise
    llm = bench.engine()
    one_by_one(llm, prompts[:2])
    bench.forget()
    for i, tokens in enumerate(prompts):
        add(llm, f"r{i}", tokens)
    for _ in range(steps):
        step(llm)
    abort(llm, "r0")
    outputs = drain(llm)
    assert not differing([outputs["r1"], outputs["r2"]], expected[1:], noise)
    bench.check_nothing_held()
    assert not differing(one_by_one(llm, prompts), expected, noise)


def test_preemption_with_few_blocks(bench: Bench) -> None:
    """For want of blocks, in the families that free none as they go, and in all of them because somebody says so."""
    prompts = [prompt(100 + 7 * i, 60 + i) for i in range(4)]
    expected, noise = bench.truth(prompts, 40), bench.noise
    llm = bench.engine(num_gpu_blocks_override=bench.family.pool, max_model_len=192, max_num_batched_tokens=192)
    preempted = []
    preempt = scheduler(llm)._preempt_request

    def counted(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request)
        return preempt(request, *args, **kwargs)

    with patch.object(scheduler(llm), "_preempt_request", counted):
        for i, tokens in enumerate(prompts):
            add(llm, str(i), tokens, 40)
        outputs: dict[str, Output] = {}
        while llm.llm_engine.has_unfinished_requests():
            for _ in range(15):
                outputs |= {output.request_id: output for output in step(llm)}
            waiting = [r for r in scheduler(llm).requests.values() if r not in scheduler(llm).running]
            if not any(any(block_ids(llm, r.request_id)) for r in waiting):  # vLLM refuses while there are loads
                assert llm.reset_prefix_cache(reset_running_requests=True)
    assert preempted
    assert not differing([outputs[str(i)] for i in range(4)], expected, noise)
    bench.check_nothing_held()


@pytest.mark.parametrize("decode", [False, True])
def test_generated_tokens_are_kept_only_when_asked_for(bench: Bench, decode: bool) -> None:
    """Of recurrent states there is nothing to keep then. Windows are kept, also where the engine itself drops them."""
    first = prompt(100, 50 + decode)
    [answer] = bench.truth([first], 40)
    following = [*first, *answer.tokens[:33]]
    [expected], noise = bench.truth([following]), bench.noise
    [_, own] = bench.own([first, following], [40 if decode else 1, 8])
    kept = len(following if decode and not bench.recurrent else first) // bench.unit * bench.unit
    llm = bench.engine(settings={"save_decode_cache": True} if decode else None)
    assert generate(llm, [first], 40) == [answer]
    bench.forget()
    [restored] = generate(llm, [following])
    assert restored.cached == kept
    assert bench.equals_own([restored], [own]) or (own.cached < kept and not differing([restored], [expected], noise))
    bench.check_nothing_held()


@pytest.mark.parametrize("heads", [1, pytest.param(2, marks=pytest.mark.long)])
def test_tensor_parallel(tmp_path: Path, manager: Manager, heads: int) -> None:
    """Two ranks with several groups: with the same head of keys and values, or with a head each."""
    folder = write_gemma3(tmp_path / "model", num_key_value_heads=heads)
    prompts = [prompt(170, 70 + i) for i in range(3)]
    options: dict[str, Any] = {"tensor_parallel_size": 2, "environment": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}}
    child = EngineProcess(folder, connector=connect(manager), **options)
    child.ready()
    child.generate([prompt(3, 999)], 1)
    until(lambda: status(manager.socket)["accounts"]["credit"], "slots are granted")
    child.generate([prompt(3, 999)], 1)  # the grant is taken in
    cold = [child.generate([tokens])[0] for tokens in prompts]
    assert [output["cached"] for output in cold] == [0, 0, 0]
    assert child.ask({"reset": True})["reset"]
    restored = [child.generate([tokens])[0] for tokens in prompts]
    assert [output["cached"] for output in restored] == [160, 160, 160]
    assert [(o["tokens"], o["logprobs"]) for o in restored] == [(o["tokens"], o["logprobs"]) for o in cold]
    # One layer's keys and values of 32 tokens and 32 lanes in float32 on each rank, unless both ranks' are the same.
    sizes = {space["object_bytes"] for space in status(manager.socket)["spaces"]}
    assert sizes == {8192 * heads}
    assert child.close() == 0
    until(lambda: not status(manager.socket)["instances"], "the sessions ended")


def test_apart() -> None:
    a = Output((1, 2, 3), (0.5, 0.25, 1.0), "length", 0, "")
    b = Output((1, 2, 3), (0.5, 0.375, 1.0), "length", 0, "")
    c = Output((1, 4, 5), (0.5, 0.375, 9.0), "length", 0, "")
    assert (apart(a, a), apart(a, b), apart(a, c)) == (0.0, 0.125, 0.125)
    assert differing([a, a, a], [a, b, c]) == [1, 2]
    assert differing([a, a, a], [a, b, c], 0.13) == []
