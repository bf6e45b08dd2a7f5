"""SGLang's HTTP server as a child process; run as a program it is that server."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from testbed.process.ports import free_port
from testbed.sglang.engine import ANSWER_SECONDS, START_SECONDS, arguments, environment


class Server:
    """A server of ``model`` on a port of its own. It answers as :class:`testbed.sglang.engine.Sglang` does."""

    def __init__(self, model: Path, log: Path, extra: dict[str, Any], set_up: dict[str, str], **options: Any) -> None:
        port = free_port()
        given = arguments(model, extra, host="127.0.0.1", port=port, **options)
        self._at = f"http://127.0.0.1:{port}"
        self._log = log
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "testbed.sglang.server", json.dumps(given)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env=environment(given) | set_up,
            )

    def __enter__(self) -> "Server":
        end = time.monotonic() + START_SECONDS
        while not self._serves():
            if self._process.poll() is not None or time.monotonic() > end:
                self.__exit__()
                raise AssertionError(f"no server:\n{self._log.read_text(errors='replace')[-6000:]}")
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(60)

    def _serves(self) -> bool:
        with contextlib.suppress(OSError):
            self._call("/health_generate")
            return True
        return False

    def _call(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self._at + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            told: bytes = answer.read()
            return told

    def generate(self, *prompts: list[int], new: int = 8) -> list[dict[str, Any]]:
        """All at once."""
        sampling = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True}
        with ThreadPoolExecutor(len(prompts)) as pool:
            bodies = [{"input_ids": prompt, "sampling_params": sampling} for prompt in prompts]
            answers = [json.loads(each) for each in pool.map(lambda body: self._call("/generate", body), bodies)]
        return [
            {
                "tokens": answer["output_ids"],
                "cached": answer["meta_info"]["cached_tokens"],
                "stored": (answer["meta_info"].get("cached_tokens_details") or {}).get("storage", 0),
            }
            for answer in answers
        ]

    def flush(self) -> None:
        """Until it succeeds."""
        end = time.monotonic() + 120
        while True:
            try:
                self._call("/flush_cache", {})
                return
            except urllib.error.HTTPError:
                assert time.monotonic() < end, "no flush succeeds"
                time.sleep(0.05)

    def metric(self, name: str) -> float:
        """The sum of what ``/metrics`` says of ``name``, whatever the labels."""
        told = self._call("/metrics").decode()
        return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", told, re.MULTILINE))


if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import ServerArgs

    run_server(ServerArgs(**json.loads(sys.argv[1])))
