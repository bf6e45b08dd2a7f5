"""vLLM's own server: resets over HTTP, and its end, at which it kills its engine and all that this has started."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from testbed.engine.bed import generate, prompt, running
from testbed.engine.kvhold_bed import status, until, warm_up
from testbed.process.ports import free_port

from kvhold import protocol as wire
from kvhold.client.channel import Channel

PROMPT = prompt(1500, 70)
WHOLE = (len(PROMPT) - 1) // 32 * 32
START_SECONDS = 240.0
SLOW = 1 << 20
"""Bytes a second written to the SSD: what the prompt stored takes longer than the server's end."""


@pytest.fixture
def own(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the sockets of own managers are."""
    monkeypatch.setenv("KVHOLD_RUNTIME_DIR", str(short_folder / "kvhold"))
    return short_folder / "kvhold"


@contextmanager
def server(model: Path, connector: dict[str, Any], log: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The process and the URL of a server that is ready."""
    port = free_port()
    transfer = {"kv_connector": "KvHoldConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    transfer["kv_connector_module_path"] = "kvhold.engines.vllm.connector"
    options = {
        "model": str(model),
        "host": "127.0.0.1",
        "port": str(port),
        "dtype": "float32",
        "max-model-len": "2048",
        "max-num-seqs": "16",
        "block-size": "32",
        "kv-cache-memory-bytes": str(64 << 20),
        "kv-transfer-config": json.dumps(transfer | {"kv_connector_extra_config": connector}),
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--skip-tokenizer-init", "--enforce-eager"]
    command += [word for name, value in options.items() for word in (f"--{name}", value)]
    served = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_SERVER_DEV_MODE": "1"}
    with log.open("wb") as out:
        environment = os.environ | served
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"

        def ready() -> bool:
            assert process.poll() is None, log.read_text()[-4000:]
            try:
                return urllib.request.urlopen(f"{url}/health", timeout=10).status == 200
            except OSError:
                return False

        end = time.monotonic() + START_SECONDS
        while not ready():
            assert time.monotonic() < end, log.read_text()[-4000:]
            time.sleep(0.1)
        yield process, url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def post(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """What is answered; raises HTTPError where that is an error."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body or {}).encode(), headers, method="POST")
    answer: dict[str, Any] = json.loads(urllib.request.urlopen(request, timeout=60).read() or b"{}")
    return answer


def complete(url: str, model: Path, tokens: list[int], most: int = 1) -> list[int]:
    """The tokens that follow."""
    body = {"model": str(model), "prompt": tokens, "max_tokens": most, "temperature": 0, "return_token_ids": True}
    [choice] = post(f"{url}/v1/completions", body)["choices"]
    found: list[int] = choice["token_ids"]
    return found


def test_what_waits_is_written_when_the_server_is_told_to_end(llama_dir: Path, own: Path, tmp_path: Path) -> None:
    connector = {"dram": "64MiB", "ssd": f"{tmp_path}/ssd:256MiB", "answer_deadline_ms": 10_000}
    with server(llama_dir, connector, tmp_path / "server.log") as (process, url):
        [path] = own.glob("e-*.sock")
        until(lambda: status(path)["instances"], "the engine is served")
        channel = Channel(path, wire.Hello("admin"), 60)
        channel.send(wire.Configure({"write_rate": SLOW}, {}))
        until(lambda: channel.receive(60), "the manager writes slowly")
        channel.close()
        complete(url, llama_dir, PROMPT)
        until(lambda: status(path)["objects"] * 32 == WHOLE, "all of it is stored")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    until(lambda: not path.exists(), "its manager ends")
    with running(llama_dir, connector=connector) as llm:
        [path] = own.glob("e-*.sock")
        until(lambda: all(log["ready"] for log in status(path)["logs"]), "the new manager knows what is on its SSD")
        warm_up(llm)
        assert generate(llm, [PROMPT])[0].cached == WHOLE


RESETS = (
    ("pause?mode=keep", "resume"),
    ("reset_prefix_cache?reset_running_requests=true&reset_external=true",),
    ("pause?mode=wait", "resume"),
    ("reset_prefix_cache?reset_external=true",),  # refused while requests run
)


def test_resets_under_load_change_no_answer_and_no_name(llama_dir: Path, own: Path, tmp_path: Path) -> None:
    """Over HTTP, with requests under way: weights that stay keep their namespace, whatever was reset how often."""
    prompts = [prompt(400, seed) for seed in range(4)]
    connector = {"dram": "64MiB", "answer_deadline_ms": 10_000}
    with server(llama_dir, connector, tmp_path / "server.log") as (_, url), ThreadPoolExecutor(4) as clients:
        [path] = own.glob("e-*.sock")
        until(lambda: status(path)["instances"], "the engine is served")
        expected = [complete(url, llama_dir, tokens, 8) for tokens in prompts]
        for ways in RESETS * 3:
            asked = [clients.submit(complete, url, llama_dir, tokens, 8) for tokens in prompts * 2]
            for way in ways:
                post(f"{url}/{way}")
            assert [each.result(60) for each in asked] == expected * 2, ways
        until(lambda: post(f"{url}/reset_prefix_cache?reset_external=true")["success"], "nothing runs any more")
        found = status(path)["spaces"]
        assert [complete(url, llama_dir, tokens, 8) for tokens in prompts] == expected
        until(lambda: status(path)["spaces"][0]["keys_found"] >= found[0]["keys_found"] + 4 * 12, "all was restored")
        assert len(status(path)["spaces"]) == 1
