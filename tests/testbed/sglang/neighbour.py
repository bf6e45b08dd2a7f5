"""A vLLM engine beside SGLang's, in vLLM's own environment: ``testbed/engine/engine_process.py`` run as a program."""

import json
import subprocess
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2]
PYTHON = TESTS.parent / ".venv" / "bin" / "python"


class Vllm:
    """An engine of ``model`` that is attached to the manager on ``socket`` once this returns."""

    def __init__(self, model: Path, socket: Path) -> None:
        connector = {"socket": str(socket), "answer_deadline_ms": 10_000}
        program = str(TESTS / "testbed" / "engine" / "engine_process.py")
        self._process = subprocess.Popen(
            [str(PYTHON), program, json.dumps({"model_dir": str(model), "connector": connector})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def generate(self, prompt: list[int]) -> dict[str, Any]:
        """The tokens, their log probabilities to the bit, and how many tokens were ``cached``."""
        [output] = self.ask({"generate": [prompt], "max_tokens": 8})["outputs"]
        answer: dict[str, Any] = output
        return answer

    def ask(self, command: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        print(json.dumps(command), file=self._process.stdin, flush=True)
        return self._answer()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(60)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the engine process ended"
        return json.loads(line)
