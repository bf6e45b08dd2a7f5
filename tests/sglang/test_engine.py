"""kvhold in SGLang's real engine: what is restored gives the tokens of a cold run, whatever becomes of the manager."""

import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from testbed.process.manager_process import Manager, all_written
from testbed.process.peers import populated, status, until
from testbed.sglang.engine import PAGE, Sglang
from testbed.sglang.model import HEAD, KV_HEADS, LAYERS, VOCABULARY, make_adapter, make_llama
from testbed.sglang.neighbour import Vllm
from testbed.sglang.server import Server

from kvhold.folders import VARIABLE

TAMPERED = {"module_path": "testbed.sglang.tampered"}
FAULTY = Path(__file__).parents[1] / "testbed" / "process" / "ssd_faulty.py"
FAILING = {"SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.2", "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.02"}
"""SGLang's own injector of failures and delays, which sits before the storage."""
PAGE_BYTES = PAGE * 2 * LAYERS * KV_HEADS * HEAD * 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two of the same configuration, with other weights."""
    folder = tmp_path_factory.mktemp("models")
    return [make_llama(folder / name, seed) for seed, name in enumerate(("first", "second"), 1)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("k")


@pytest.fixture(scope="module")
def host(place: Path) -> Iterator[Manager]:
    """A manager with an SSD."""
    manager = Manager(place, "--ssd", f"{place / 'ssd'}:256MiB", dram="256MiB")
    populated(manager.socket)
    yield manager
    manager.cont()
    manager.kill()


@pytest.fixture(scope="module")
def engine(host: Manager, models: list[Path], place: Path) -> Iterator[Sglang]:
    with Sglang(models[0], place / "engine.log", {"socket": str(host.socket)}) as one:
        yield one


@pytest.fixture(autouse=True)
def nothing_held(host: Manager) -> Iterator[None]:
    """Whatever was tried, nothing is leased once it is over, though the engines go on."""
    yield
    held = ("leased", "doomed", "orphaned")
    until(lambda: not any(status(host.socket)["accounts"][state] for state in held), "nothing is held")


Prompts = Callable[..., list[list[int]]]


@pytest.fixture
def prompts(request: pytest.FixtureRequest) -> Prompts:
    """Prompts that no other test has."""
    rng = random.Random(request.node.name)

    def make(count: int = 1, tokens: int = 400) -> list[list[int]]:
        return [[rng.randrange(3, VOCABULARY) for _ in range(tokens)] for _ in range(count)]

    return make


def tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["tokens"] for answer in answers]


def whole_pages(prompt: list[int]) -> int:
    """Tokens of a prompt that can be restored: something is left to compute."""
    return (len(prompt) - 1) // PAGE * PAGE


@contextmanager
def attached(engine: Sglang, host: Manager, policy: str = "wait_complete", **extra: Any) -> Iterator[None]:
    """With another storage attached at run time; afterwards with kvhold's own again."""
    own = {"socket": str(host.socket)}
    engine.detach()
    engine.attach(own | extra, policy)
    try:
        yield
    finally:
        engine.detach()
        engine.attach(own, "wait_complete")


def serves(engine: Sglang, prompt: list[int], cold: list[int]) -> None:
    """What is stored now is restored, after a while: a manager may only just be back."""

    def restored() -> bool:
        [answer] = engine.generate(prompt)
        assert answer["tokens"] == cold
        engine.flush()
        return bool(answer["stored"] == whole_pages(prompt))

    until(restored, "restored")


def test_what_is_restored_after_a_flush_is_the_engines_own_to_the_bit(engine: Sglang, prompts: Prompts) -> None:
    [prompt] = prompts()
    [cold] = engine.generate(prompt, logprobs=True)
    [own] = engine.generate(prompt, logprobs=True)
    assert (cold["cached"], own["cached"], own["stored"]) == (0, whole_pages(prompt), 0)
    engine.flush()
    [restored] = engine.generate(prompt, logprobs=True)
    assert restored["stored"] == whole_pages(prompt)
    assert restored["tokens"] == own["tokens"] == cold["tokens"]
    assert restored["logprobs"] == own["logprobs"]


def test_requests_at_once_with_common_heads(engine: Sglang, prompts: Prompts) -> None:
    head, *tails = prompts(5, 200)
    asked = [head + tail[: 40 * number] for number, tail in enumerate(tails, 2)]
    cold = tokens(engine.generate(*asked))
    engine.flush()
    answers = engine.generate(*asked)
    assert tokens(answers) == cold
    assert sum(answer["cached"] for answer in answers) == sum(map(whole_pages, asked))
    assert any(answer["stored"] for answer in answers)


def test_salts_share_nothing(engine: Sglang, prompts: Prompts) -> None:
    [prompt] = prompts()
    [cold] = engine.generate(prompt, salt="mine")
    engine.flush()
    [others] = engine.generate(prompt, salt="yours")
    [again] = engine.generate(prompt, salt="mine")
    assert (others["stored"], again["stored"]) == (0, whole_pages(prompt))
    assert others["tokens"] == again["tokens"] == cold["tokens"]


def test_zeros_in_place_of_what_was_stored_change_tokens(engine: Sglang, host: Manager, prompts: Prompts) -> None:
    """The negative control. A page that fails inside of a batch changes nothing but what is restored."""
    [prompt] = prompts()
    [cold] = engine.generate(prompt)
    engine.flush()
    with attached(engine, host, class_name="Zeros", **TAMPERED):
        [zeros] = engine.generate(prompt)
        assert zeros["stored"] == whole_pages(prompt)
        assert zeros["tokens"] != cold["tokens"]
        engine.flush()
    with attached(engine, host, class_name="BadPage", **TAMPERED):
        [bad] = engine.generate(prompt)
        assert bad["stored"] == 3 * PAGE
        assert bad["tokens"] == cold["tokens"]
        engine.flush()
    serves(engine, prompt, cold["tokens"])


def test_without_a_manager_all_is_computed(engine: Sglang, host: Manager, prompts: Prompts, place: Path) -> None:
    [prompt] = prompts()
    [cold] = engine.generate(prompt)
    engine.flush()
    with attached(engine, host, socket=str(place / "nobody.sock")):
        [computed] = engine.generate(prompt)
        assert (computed["cached"], computed["tokens"]) == (0, cold["tokens"])
        engine.flush()
    serves(engine, prompt, cold["tokens"])


def test_an_arena_that_is_full_keeps_what_it_can(
    engine: Sglang, host: Manager, prompts: Prompts, tmp_path_factory: pytest.TempPathFactory
) -> None:
    asked = prompts(6)
    cold = tokens(engine.generate(*asked))
    engine.flush()
    small = Manager(tmp_path_factory.mktemp("s"), dram="4MiB")
    try:
        with attached(engine, host, socket=str(small.socket)):
            for _ in range(3):
                assert tokens(engine.generate(*asked)) == cold
                engine.flush()
            serves(engine, asked[0], cold[0])
    finally:
        small.kill()


@pytest.mark.parametrize("policy", ["best_effort", "timeout"])
def test_who_does_not_wait_for_all_of_it_computes_the_rest(
    engine: Sglang, host: Manager, prompts: Prompts, policy: str
) -> None:
    asked = prompts(4)
    cold = tokens(engine.generate(*asked))
    with attached(engine, host, policy):
        for _ in range(3):
            engine.flush()
            answers = engine.generate(*asked)
            assert tokens(answers) == cold
            assert all(answer["stored"] % PAGE == 0 for answer in answers)
            if policy == "timeout":  # which is a second, and as much again for a longer prompt
                assert any(answer["stored"] for answer in answers)
        engine.flush()
    serves(engine, asked[0], cold[0])


def test_no_request_notices_what_becomes_of_the_ssd(
    engine: Sglang, host: Manager, prompts: Prompts, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """More than the arena holds is asked for, again and again, while reads and writes fail, hang or crawl."""
    asked = prompts(6)
    cold = tokens(engine.generate(*asked))
    engine.flush()
    folder = tmp_path_factory.mktemp("f")
    faults = folder / "faults"
    faults.mkdir()
    small = Manager(folder, "--ssd", f"{folder}/ssd:64MiB", dram="4MiB", program=(str(FAULTY), str(faults)))
    in_dram = (4 << 20) // PAGE_BYTES * PAGE

    def stored() -> int:
        answers = engine.generate(*asked)
        assert tokens(answers) == cold
        engine.flush()
        return sum(answer["stored"] for answer in answers)

    def from_ssd() -> bool:
        return stored() > in_dram and all_written(status(small.socket))

    try:
        populated(small.socket)
        with attached(engine, host, socket=str(small.socket), read_deadline_ms=300):
            until(from_ssd, "more is restored than there is room for in DRAM")
            for fault, text in (("fail-read", "EIO"), ("block-read", ""), ("delay-read", "0.2"), ("fail-write", "EIO")):
                (faults / f"{fault}.new").write_text(text)
                (faults / f"{fault}.new").rename(faults / fault)
                for _ in range(2):
                    stored()
                (faults / fault).unlink()
            until(from_ssd, "it is used again")
    finally:
        small.kill()
    serves(engine, asked[0], cold[0])


def test_another_engine_finds_it_also_after_all_have_been_killed(
    engine: Sglang, host: Manager, models: list[Path], place: Path, prompts: Prompts
) -> None:
    """Before the tests that change weights: the engine's pages have had names of their own since."""
    [prompt] = prompts()
    [cold] = engine.generate(prompt, logprobs=True)
    engine.flush()
    [own] = engine.generate(prompt, logprobs=True)
    with Sglang(models[0], place / "second.log", {"socket": str(host.socket)}) as second:
        [restored] = second.generate(prompt, logprobs=True)
        assert restored["stored"] == whole_pages(prompt)
        assert (restored["tokens"], restored["logprobs"]) == (cold["tokens"], own["logprobs"])
        second.flush()
        until(lambda: all_written(status(host.socket)), "written")
        host.restart()
        populated(host.socket)
        serves(second, prompt, cold["tokens"])


def test_vllm_and_sglang_share_one_manager_and_no_bytes(
    engine: Sglang, host: Manager, models: list[Path], prompts: Prompts
) -> None:
    """Each finds its own at the same time as the other, and a namespace keeps to its limit beside another."""
    [prompt] = prompts()
    known = dram(host).keys()
    [other] = prompts()
    vllm = Vllm(models[0], host.socket)
    try:
        theirs = vllm.generate(prompt)
        [cold] = engine.generate(prompt)
        assert (theirs["cached"], cold["cached"]) == (0, 0), "neither finds what the other has stored"
        engine.flush()
        assert vllm.ask({"reset": True}) == {"reset": True}
        both = threading.Thread(target=serves, args=(engine, prompt, cold["tokens"]))
        both.start()
        again = vllm.generate(prompt)
        both.join()
        assert (again["tokens"], again["logprobs"]) == (theirs["tokens"], theirs["logprobs"])
        assert again["cached"] == whole_pages(prompt)
        serves(engine, prompt, cold["tokens"])
        before = dram(host)
        [name] = before.keys() - known
        limit(host, name, "256KiB")
        vllm.generate(other)  # a namespace gives way when it wants room
        until(lambda: dram(host)[name] <= 256 << 10, "the limit holds")
        assert {each: size for each, size in dram(host).items() if each != name} == {
            each: size for each, size in before.items() if each != name
        }
        serves(engine, prompt, cold["tokens"])
    finally:
        vllm.kill()


def dram(host: Manager) -> dict[str, int]:
    """By namespace, bytes in DRAM."""
    return {one["namespace"]: one["dram_bytes"] for one in status(host.socket)["spaces"]}


def limit(host: Manager, namespace: str, most: str) -> None:
    command = ["-m", "kvhold.cli", "limit", "--namespace", namespace, "--max", most, "--socket", str(host.socket)]
    done = subprocess.run([sys.executable, *command], check=False, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("how", ["update", "distribute", "hand_over"])
def test_after_a_weight_update_nothing_old_is_found(
    engine: Sglang, models: list[Path], prompts: Prompts, how: str
) -> None:
    """From files, or as a trainer sends weights."""
    [prompt] = prompts()
    first, second = map(str, models)
    [cold] = engine.generate(prompt)
    engine.flush()
    assert engine.ask(how, model=second)
    [changed] = engine.generate(prompt)
    assert changed["cached"] == 0
    assert changed["tokens"] != cold["tokens"]
    engine.flush()
    serves(engine, prompt, changed["tokens"])
    assert engine.ask("update", model=first)
    [back] = engine.generate(prompt)
    assert (back["cached"], back["tokens"]) == (0, cold["tokens"])


def test_until_a_flush_old_pages_are_not_stored_as_new(engine: Sglang, models: list[Path], prompts: Prompts) -> None:
    """Without a flush SGLang itself goes on with what it has; that must not outlive it."""
    [prompt] = prompts()
    first, second = map(str, models)
    [cold] = engine.generate(prompt)
    assert engine.ask("update", model=second, flush_cache=False)
    engine.generate(prompt + prompt[:100])
    engine.flush()
    [changed] = engine.generate(prompt)
    assert changed["cached"] == 0
    assert changed["tokens"] != cold["tokens"]
    engine.flush()  # pages that are still written would keep the update from one
    assert engine.ask("update", model=first)
    [back] = engine.generate(prompt)
    assert (back["cached"], back["tokens"]) == (0, cold["tokens"])


def test_without_the_hooks_old_kv_is_served(
    engine: Sglang, host: Manager, models: list[Path], prompts: Prompts
) -> None:
    """The negative control of the tests of updates."""
    [prompt] = prompts()
    first, second = map(str, models)
    with attached(engine, host, class_name="Deaf", **TAMPERED):
        [cold] = engine.generate(prompt)
        engine.flush()
        assert engine.ask("update", model=second)
        [stale] = engine.generate(prompt)
        assert stale["stored"] == whole_pages(prompt)
        engine.flush()
    [right] = engine.generate(prompt)
    assert right["stored"] == 0
    assert right["tokens"] != stale["tokens"]
    engine.flush()
    assert engine.ask("update", model=first)
    [back] = engine.generate(prompt)
    assert (back["cached"], back["tokens"]) == (0, cold["tokens"])


def test_what_was_cleared_is_not_found(engine: Sglang, prompts: Prompts) -> None:
    [prompt] = prompts()
    [cold] = engine.generate(prompt)
    engine.flush()
    assert engine.ask("clear")
    [again] = engine.generate(prompt)
    assert (again["cached"], again["tokens"]) == (0, cold["tokens"])
    engine.flush()
    serves(engine, prompt, cold["tokens"])


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_no_request_notices_what_becomes_of_the_manager(
    engine: Sglang, host: Manager, prompts: Prompts, how: str
) -> None:
    asked = prompts(6, 300)
    cold = tokens(engine.generate(*asked))
    engine.flush()
    fault = threading.Thread(target=host.kill if how == "killed" else host.stop)
    fault.start()
    for _ in range(2):
        assert tokens(engine.generate(*asked)) == cold
        engine.flush()
    fault.join()
    host.start() if how == "killed" else host.cont()
    populated(host.socket)
    serves(engine, asked[0], cold[0])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"pp_size": 2}, id="two stages", marks=pytest.mark.long),
        pytest.param(
            {"pp_size": 2, "hicache_host_memory_mode": "buffer_only"},
            id="two stages that stage",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"tp_size": 2, "hicache_host_memory_mode": "buffer_only"}, id="two ranks that stage", marks=pytest.mark.long
        ),
        pytest.param({"hicache_mem_layout": "page_first"}, id="page first", marks=pytest.mark.long),
    ],
)
def test_every_way_to_run(
    host: Manager, models: list[Path], place: Path, prompts: Prompts, options: dict[str, Any]
) -> None:
    if options.get("hicache_mem_layout", "page_first_direct") != "page_first_direct":
        options = {"hicache_io_backend": "kernel", **options}
    name = f"{'-'.join(map(str, options.values()))}.log"
    with Sglang(models[0], place / name, {"socket": str(host.socket)}, environment=FAILING, **options) as one:
        answers_as_before(one, prompts(4, 300))


def answers_as_before(engine: Sglang | Server, asked: list[list[int]]) -> None:
    """Seven times, with flushes between; some of it is restored."""
    cold = tokens(engine.generate(*asked))
    stored = 0
    for _ in range(6):
        engine.flush()
        answers = engine.generate(*asked)
        assert tokens(answers) == cold
        stored += sum(answer["stored"] for answer in answers)
    assert stored


def test_a_server_says_what_it_restored_and_stored(
    host: Manager, models: list[Path], place: Path, prompts: Prompts
) -> None:
    """In its metrics, which add up; its host pool only stages what is copied."""
    options = {"hicache_host_memory_mode": "buffer_only", "hicache_mem_layout": "layer_first", "enable_metrics": True}
    extra = {"socket": str(host.socket)}
    with Server(
        models[0],
        place / "server.log",
        extra,
        FAILING,
        hicache_io_backend="kernel",
        enable_cache_report=True,
        **options,
    ) as one:
        asked = prompts(4, 300)
        answers_as_before(one, asked)

        def pages(what: str) -> float:
            return one.metric(f"kvhold:pages_{what}_total")

        until(lambda: pages("published") + pages("present") >= sum(map(whole_pages, asked)) / PAGE, "all is stored")
        until(lambda: pages("restored"), "some of it was restored")
        assert pages("asked") == pages("found") + pages("missed")
        assert pages("found") == pages("restored") + pages("void")
        assert pages("offered") == pages("present") + pages("published") + pages("unpublished")
        assert pages("looked_for") == pages("seen") + pages("unseen")
        assert one.metric("kvhold:restore_bytes_total") >= pages("restored") * PAGE_BYTES
        assert one.metric("sglang:prefetch_pgs_sum") >= pages("restored")


@pytest.mark.long
def test_files_that_are_exchanged_under_an_engine_say_nothing_of_it(
    host: Manager, models: list[Path], place: Path, prompts: Prompts
) -> None:
    """It goes on with the weights that it has loaded, also when a storage is attached later."""
    [prompt] = prompts()
    model, extra = place / "exchanged", {"socket": str(host.socket)}
    shutil.copytree(models[0], model)
    with Sglang(model, place / "exchanged.log", None) as one:
        [cold] = one.generate(prompt)
        shutil.copytree(models[1], model, dirs_exist_ok=True)
        one.flush()
        one.attach(extra)
        one.generate(prompt)
        one.flush()
        serves(one, prompt, cold["tokens"])
    with Sglang(model, place / "exchanged.log", extra) as another:
        [answer] = another.generate(prompt)
        assert answer["cached"] == 0
        assert answer["tokens"] != cold["tokens"]


@pytest.mark.long
def test_other_files_of_an_adapter_are_another_adapter(
    host: Manager, models: list[Path], place: Path, prompts: Prompts
) -> None:
    """Of one name and path: loaded again while the engine runs, and in another engine."""
    [prompt] = prompts()
    files = make_adapter(place / "adapter", 1)
    options: dict[str, Any] = {
        "enable_lora": True,
        "lora_paths": {"sql": str(files)},
        "lora_backend": "torch_native",
        "max_lora_rank": 4,
        "lora_target_modules": ["q_proj", "v_proj"],
    }
    extra = {"socket": str(host.socket)}
    with Sglang(models[0], place / "adapter.log", extra, **options) as one:
        [plain] = one.generate(prompt)
        [cold] = one.generate(prompt, adapter="sql")
        assert cold["cached"] == 0
        assert cold["tokens"] != plain["tokens"]
        one.flush()
        [restored] = one.generate(prompt, adapter="sql")
        assert (restored["stored"], restored["tokens"]) == (whole_pages(prompt), cold["tokens"])
        one.flush()
        make_adapter(files, 2)
        assert one.ask("exchange", name="sql", path=str(files))
        [exchanged] = one.generate(prompt, adapter="sql")
        assert exchanged["cached"] == 0
        assert exchanged["tokens"] != cold["tokens"]
    with Sglang(models[0], place / "adapter.log", extra, **options) as another:
        [answer] = another.generate(prompt, adapter="sql")
        assert (answer["cached"], answer["tokens"]) == (0, exchanged["tokens"])


def test_two_ranks_and_the_manager_that_they_start(models: list[Path], place: Path, prompts: Prompts) -> None:
    """They share one, as nobody names another; 200 requests see none of SGLang's own failures, nor bad pages."""
    runtime = place / "own"
    environment = FAILING | {VARIABLE: str(runtime)}
    extra = {"dram": "64MiB", "ssd": f"{runtime}/ssd:64MiB"}
    with Sglang(models[0], place / "ranks.log", extra, environment=environment, tp_size=2) as one:
        [socket] = runtime.glob("e-*.sock")
        assert len(status(socket)["instances"]) == 2
        answers_as_before(one, prompts(29, 200))
        [prompt] = prompts(2)[1:]
        [cold] = one.generate(prompt)
        one.flush()
        one.detach()
        one.attach(extra | TAMPERED | {"class_name": "BadPageOfOneRank"})

        def cut_short() -> bool:
            [answer] = one.generate(prompt)
            assert answer["tokens"] == cold["tokens"]
            one.flush()
            assert answer["stored"] <= 2 * PAGE, "what one rank lacks is restored by none"
            return bool(answer["stored"] == 2 * PAGE)

        until(cut_short, "what comes before the bad page is restored")
        one.detach()
        one.attach(extra)
        assert one.ask("update", model=str(models[1]))
        [changed] = one.generate(prompt)
        assert changed["cached"] == 0
        assert changed["tokens"] != cold["tokens"]
        one.flush()
        serves(one, prompt, changed["tokens"])  # ranks that had other names for it would not find it together
    until(lambda: not list(runtime.glob("e-*.sock")), "the manager ends with its engine")
