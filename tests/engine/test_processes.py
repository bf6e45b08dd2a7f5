"""Engines and managers as the processes they are: shared, embedded, killed."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from testbed.engine.bed import close, engine, generate, prompt, reference, running
from testbed.engine.engine_process import EngineProcess, packed
from testbed.engine.kvhold_bed import attached, connect, serving, status, until, warm_up
from testbed.process.manager_process import Manager
from vllm.config import KVTransferConfig

from kvhold.engines.common import attaching
from kvhold.engines.vllm.names import engine_of

PROMPTS = [prompt(400, seed) for seed in range(3)]


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime directory of this test alone: no manager of the host is found."""
    with tempfile.TemporaryDirectory(prefix="kvr-") as folder:
        monkeypatch.setenv("KVHOLD_RUNTIME_DIR", f"{folder}/kvhold")
        yield Path(folder) / "kvhold"


def bits(outputs: list[Any]) -> list[Any]:
    """Tokens and logprobs, to the last bit."""
    return [(o["tokens"], o["logprobs"]) for o in outputs]


def managers(runtime: Path) -> list[int]:
    """Processes of managers whose socket lies in ``runtime``."""
    listing = subprocess.run(["ps", "-eww", "-o", "pid,stat,args"], capture_output=True, text=True, check=True).stdout
    lines = [line.split(None, 2) for line in listing.splitlines() if "kvhold.manager" in line and str(runtime) in line]
    return [int(pid) for pid, state, _ in lines if not state.startswith("Z")]


def leftovers(runtime: Path) -> list[str]:
    return sorted(path.name for path in runtime.iterdir()) if runtime.exists() else []


def test_two_engines_at_once_share_one_manager(llama_dir: Path, manager: Manager) -> None:
    expected = [packed(output) for output in reference(llama_dir, PROMPTS)]
    other = EngineProcess(llama_dir, connector=connect(manager))
    with serving(llama_dir, manager) as llm:
        other.ready()
        assert len([i for i in status(manager.socket)["instances"] if i["ready"]]) == 2
        cold = [packed(output) for output in generate(llm, PROMPTS[:2])]
        assert bits(cold) == bits(expected[:2])
        restored = other.generate(PROMPTS)
        assert bits(restored) == bits(expected)
        assert [output["cached"] for output in restored] == [384, 384, 0]
        assert llm.reset_prefix_cache()
        assert generate(llm, PROMPTS[2:])[0].cached == 384
        other.kill()  # its leases and credits come back, the objects stay
        until(lambda: len(status(manager.socket)["instances"]) == 1, "the dead engine is forgotten")
        assert status(manager.socket)["objects"] == 36
    until(lambda: status(manager.socket)["accounts"]["credit"] == 0, "nothing is held")


def test_embedded_by_default_and_gone_with_the_engine(llama_dir: Path, runtime: Path) -> None:
    expected = reference(llama_dir, PROMPTS)
    llm = engine(llama_dir, connector={"answer_deadline_ms": 10_000})
    try:
        warm_up(llm)
        assert len(managers(runtime)) == 1
        assert generate(llm, PROMPTS) == expected
        assert llm.reset_prefix_cache()
        restored = generate(llm, PROMPTS)
        assert restored == expected
        assert [output.cached for output in restored] == [384, 384, 384]
    finally:
        close(llm)
    until(lambda: not managers(runtime), "the manager ends with the engine")
    until(lambda: not leftovers(runtime), "its files are gone")


def test_embedded_manager_is_replaced_when_it_is_killed(llama_dir: Path, runtime: Path) -> None:
    expected = reference(llama_dir, PROMPTS)
    with running(llama_dir, connector={"answer_deadline_ms": 10_000, "dram": "64MiB"}) as llm:
        warm_up(llm)
        [pid] = managers(runtime)
        os.kill(pid, signal.SIGKILL)
        until(lambda: (found := managers(runtime)) and found != [pid], "another manager is started")
        warm_up(llm)
        for _ in range(2):
            outputs = generate(llm, PROMPTS)
            assert outputs == expected
            assert llm.reset_prefix_cache()
        assert [output.cached for output in outputs] == [384, 384, 384]
    until(lambda: not managers(runtime), "it ends with the engine too")


def test_embedded_manager_ends_when_the_engine_is_killed(llama_dir: Path, runtime: Path) -> None:
    child = EngineProcess(llama_dir, connector={"dram": "64MiB"})
    child.ready()
    [pid] = managers(runtime)
    child.generate(PROMPTS)
    child.kill()
    until(lambda: not managers(runtime), "the manager ends")
    until(lambda: not leftovers(runtime), "its files are gone")
    until(lambda: _is_gone(pid), "the process is gone")


def _is_gone(pid: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def test_the_hosts_manager_is_preferred_to_an_own_one(
    llama_dir: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(attaching.log, "warning", lambda text, *args: said.append(text % args))
    runtime.mkdir(mode=0o700)
    process = Manager(runtime)  # listens on the default path
    try:
        with running(llama_dir, connector={"dram": "64MiB", "ssd": f"{runtime}/ssd:64MiB"}) as llm:
            warm_up(llm)
            assert status(process.socket)["instances"][0]["ready"]
            assert not managers(runtime)
            process.restart()
            until(lambda: attached(llm), "attached again, and not to an own one")
            assert not managers(runtime)
        assert len(said) == 1, "once, by one of the two halves"
        assert f"using the manager on {process.socket}, which has its own" in said[0]
        assert "those of this engine for dram, ssd are ignored" in said[0]
        assert not (runtime / "ssd").exists()
        with running(llama_dir, connector={}) as llm:
            warm_up(llm)
        assert len(said) == 1, "nothing is ignored that was not set"
    finally:
        process.kill()


def test_data_parallel_ranks_share_one_socket() -> None:
    first, *others = [attaching.own_sockets(engine_of(instance)) for instance in ("abc_dp0", "abc_dp1", "abc")]
    assert others == [first, first]
    assert not set(attaching.own_sockets("abd")) & set(first)


def test_found_by_its_bare_name(llama_dir: Path, manager: Manager) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvhold.engines.vllm import plugin

    plugin.register()
    plugin.register()  # idempotent
    transfer = KVTransferConfig(kv_connector="KvHoldConnector", kv_role="kv_both")
    assert KVConnectorFactory.get_connector_class(transfer).__name__ == "KvHoldConnector"


def test_same_engine_id_twice_is_refused_and_harmless(llama_dir: Path, manager: Manager) -> None:
    expected = [packed(output) for output in reference(llama_dir, PROMPTS[:1])]
    with serving(llama_dir, manager) as llm:
        [instance] = status(manager.socket)["instances"]
        name = instance["instance"]
        from kvhold import protocol as wire
        from kvhold.client.channel import AttachError, Channel

        with pytest.raises(AttachError, match="already has a live scheduler"):
            Channel(manager.socket, wire.Hello("scheduler", name), 5)
        assert bits([packed(o) for o in generate(llm, PROMPTS[:1])]) == bits(expected)
