"""Hits of data-parallel ranks on busy cores: two ranks of a dense model on vLLM's own server against one.

    ./dev run python benchmarks/ranks.py [--prompts 16] [--ranks 1 2]

Each prompt is computed by one rank and, once the ranks' own caches are cleared, asked for at the next one, while as
many processes spin as there are cores. Goal: every hit that one rank has, two ranks have.
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import median
from lookup import await_arena

Prompt = list[int]

LENGTHS = (500, 1000, 2000, 4000, 8000)
AT_ONCE, AT_ONCE_TOKENS = 10, 1000
BLOCK = 32
START_SECONDS = 900.0
"""Each of a server's processes imports vLLM, and the cores are shared."""
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}


@contextmanager
def server(folder: Path, ranks: int) -> Iterator[str]:
    """The URL of a server that is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    transfer = {
        "kv_connector": "KvHoldConnector",
        "kv_connector_module_path": "kvhold.engines.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"dram": "512MiB"},
    }
    options = {
        "model": folder,
        "host": "127.0.0.1",
        "port": port,
        "served-model-name": "ranks",
        "data-parallel-size": ranks,
        "load-format": "dummy",
        "dtype": "float32",
        "max-model-len": max(LENGTHS) + 256,
        "block-size": BLOCK,
        "kv-cache-memory-bytes": 256 << 20,
        "kv-transfer-config": json.dumps(transfer),
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--skip-tokenizer-init", "--enforce-eager", "--enable-prompt-tokens-details"]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    environment = os.environ | {
        "KVHOLD_RUNTIME_DIR": str(folder / "run"),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    log = folder / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        end = time.monotonic() + START_SECONDS
        while True:
            if process.poll() is not None or time.monotonic() > end:
                sys.exit(f"the server does not start:\n{log.read_text()[-4000:]}")
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/health", timeout=10)
                break
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def busy_cores() -> Iterator[None]:
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def post(url: str, body: dict[str, Any], **headers: str) -> bytes:
    headers = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers, method="POST")
    answer: bytes = urllib.request.urlopen(request, timeout=600).read()
    return answer


def ask(url: str, prompt: Prompt, rank: int) -> tuple[int, float]:
    """Tokens of the prompt that did not have to be computed, and the milliseconds until its answer."""
    body = {"model": "ranks", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    begun = time.perf_counter()
    answer = json.loads(post(f"{url}/v1/completions", body, **{"X-data-parallel-rank": str(rank)}))
    took = (time.perf_counter() - begun) * 1e3
    return (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0, took


def missed(url: str) -> Counter[str]:
    """Tokens that were asked for and not restored, by reason."""
    text = urllib.request.urlopen(f"{url}/metrics", timeout=60).read().decode()
    found = re.findall(r"^kvhold:tokens_missed_(\w+)_total\{.*\} (\S+)$", text, re.MULTILINE)
    total: Counter[str] = Counter()
    for reason, tokens in found:
        total[reason] += int(float(tokens))
    return total


@dataclass
class Hits:
    """Of some prompts: percent of their whole blocks that were restored, medians of what their answers took, the first
    and the second time, and of the second time the tokens that were not restored, by reason."""

    percent: float
    first_ms: float
    second_ms: float
    missed: Counter[str]


def hits(url: str, ranks: int, prompts: Sequence[Prompt], at_once: int) -> Hits:
    with ThreadPoolExecutor(at_once) as clients:

        def all_of(turn: int) -> list[tuple[int, float]]:
            each = ((prompt, (number + turn) % ranks) for number, prompt in enumerate(prompts))
            return list(clients.map(lambda one: ask(url, *one), each))

        first = all_of(0)
        post(f"{url}/reset_prefix_cache", {})
        before = missed(url)
        second = all_of(1)
    possible = sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts)
    percent = 100 * sum(tokens for tokens, _ in second) / possible
    return Hits(percent, median([ms for _, ms in first]), median([ms for _, ms in second]), missed(url) - before)


def measure(ranks: int, count: int) -> dict[str, Hits]:
    rng = random.Random(0)

    def prompts(length: int) -> list[Prompt]:
        return [[rng.randrange(3, 500) for _ in range(length)] for _ in range(count)]

    with tempfile.TemporaryDirectory(prefix="kvhold-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(MODEL))
        url = stack.enter_context(server(folder, ranks))
        for rank in range(ranks):
            ask(url, prompts(100)[0], rank)  # an engine introduces its KV cache with its first request
        [manager] = (folder / "run").glob("*.sock")
        await_arena(manager)
        stack.enter_context(busy_cores())
        found = {f"{length} tokens": hits(url, ranks, prompts(length), 1) for length in LENGTHS}
        found[f"{AT_ONCE} at once"] = hits(url, ranks, prompts(AT_ONCE_TOKENS), AT_ONCE)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=16, help="of each length")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    table = {ranks: measure(ranks, options.prompts) for ranks in sorted(options.ranks)}
    print(f"{options.prompts} prompts' blocks that were restored, and ms until the first and the second answer")
    print(" " * 16 + "".join(f"{ranks} rank{'s' * (ranks > 1)}".rjust(30) for ranks in table))
    least, *others = table.values()
    for what in least:
        row = [found[what] for found in table.values()]
        cells = [f"{each.percent:.1f}% ({each.first_ms:.0f}, {each.second_ms:.0f})".rjust(30) for each in row]
        print(f"{what:>16}" + "".join(cells))
    for ranks, found in table.items():
        total = sum((each.missed for each in found.values()), Counter[str]())
        why = ", ".join(f"{tokens} {reason}" for reason, tokens in total.most_common())
        print(f"  tokens that {ranks} missed: {why or 'none'}")
    met = all(other[what].percent >= one.percent for other in others for what, one in least.items())
    print(f"  goal, every hit that {min(table)} has: {'met' if met else 'MISSED'}")


if __name__ == "__main__":
    main()
