"""vLLM's own connector tests, the quick part; see run.py for all of them."""

import subprocess
import sys
from pathlib import Path


def test_vllms_own_connector_tests_pass_with_our_class() -> None:
    command = [sys.executable, str(Path(__file__).with_name("run.py")), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
