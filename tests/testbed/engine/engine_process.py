"""An engine in a process of its own, driven by JSON lines: what a test may kill.

Run as a program it takes the options of ``bed.engine`` as its only argument. From a test: :class:`EngineProcess`.
"""

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

ANSWER_SECONDS = 600.0
"""Until an engine that has not answered is taken to hang: one of several ranks on a busy machine imports vLLM for
minutes, since the ranks that wait for each other take processors from it."""


class EngineProcess:
    """A child that runs one engine; ``start`` returns at once, so that several can start together."""

    def __init__(self, model: Path, *, environment: dict[str, str] | None = None, **options: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps({"model_dir": str(model), **options})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | (environment or {}),
            start_new_session=True,
        )
        self._buffer = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def ready(self) -> dict[str, Any]:
        """Wait until the engine is up; what it says about itself."""
        return self._read()

    def generate(self, prompts: list[list[int]], max_tokens: int = 8) -> list[dict[str, Any]]:
        """Outputs as (tokens, logprobs as hex, cached)."""
        return self.ask({"generate": prompts, "max_tokens": max_tokens})["outputs"]

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()
        return self._read()

    def transfer(self, tokens: list[int], max_tokens: int, params: dict[str, Any] | None) -> dict[str, Any]:
        """One request's output with ``kv_transfer_params``; ``params`` are those that the engine answers with."""
        return self.ask({"transfer": tokens, "max_tokens": max_tokens, "params": params})

    def kill(self) -> None:
        """SIGKILL of this process alone; its children are left to notice."""
        self._process.kill()
        self._process.wait(ANSWER_SECONDS)

    def close(self) -> int:
        """End of input: an orderly shutdown; the exit status."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(ANSWER_SECONDS)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while b"\n" not in self._buffer:
            readable, _, _ = select.select([self._process.stdout], [], [], ANSWER_SECONDS)
            assert readable, "the engine process does not answer"
            data = os.read(self._process.stdout.fileno(), 1 << 20)
            assert data, "the engine process ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


def packed(output: Any) -> dict[str, Any]:
    """An output as JSON that keeps every bit."""
    return {
        "tokens": list(output.tokens),
        "logprobs": [value.hex() for value in output.logprobs],
        "cached": output.cached,
    }


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the engine's own prints go to stderr

    def say(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    from testbed.engine import bed, kvhold_bed

    options = json.loads(sys.argv[1])
    model = Path(options.pop("model_dir"))
    with bed.running(model, connector=options.pop("connector"), **options) as llm:
        if options.get("tensor_parallel_size", 1) == 1 and bed.scheduler_half(llm) is not None:
            kvhold_bed.warm_up(llm)
        say({"pid": os.getpid()})
        for line in sys.stdin:
            command = json.loads(line)
            if "generate" in command:
                outputs = bed.generate(llm, command["generate"], command["max_tokens"])
                say({"outputs": [packed(output) for output in outputs]})
            elif "transfer" in command:
                limits = [bed._greedy(command["max_tokens"], command["params"])]
                [request] = llm.generate([bed._inputs(command["transfer"], None)], limits, use_tqdm=False)
                say({**packed(bed.Output.of(request)), "params": request.kv_transfer_params})
            elif "reset" in command:
                bed.settle(llm)
                say({"reset": llm.reset_prefix_cache()})


if __name__ == "__main__":
    main()
