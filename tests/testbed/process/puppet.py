"""Peers and starters in a process of its own, which tests may kill. Lines of JSON: what to do, and what came of it."""

import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DEADLINE = 60.0


def environment(**more: str) -> dict[str, str]:
    """A child imports the kvhold that the tests import, installed or not, and what lies beside this file."""
    package = importlib.util.find_spec("kvhold")
    assert package is not None
    assert package.origin is not None
    paths = [str(Path(package.origin).parents[1]), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | more


class Puppet:
    """The process, as seen by a test. What it starts has its sockets in ``folder``; ``within`` runs it."""

    def __init__(self, folder: Path, within: Sequence[str] = ()) -> None:
        self._process = subprocess.Popen(
            [*within, sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(KVHOLD_RUNTIME_DIR=str(folder / "kvhold")),
        )
        self._names = itertools.count()

    @property
    def pid(self) -> int:
        return self._process.pid

    def make(self, kind: str, *arguments: Any) -> "Handle":
        """A Peer, an Asker or an Embedded in the process, or a fork of it."""
        name = str(next(self._names))
        self.tell(name, kind, arguments)
        return Handle(self, name, self.hear())

    def tell(self, name: str, method: str, arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, method, arguments]) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        assert self._process.stdout is not None
        answer = json.loads(self._process.stdout.readline() or '{"error": "the puppet is gone"}')
        if isinstance(answer, dict):
            raise RuntimeError(answer["error"])
        return answer

    def kill(self) -> None:
        """kill -9; returns when the process is gone."""
        self._process.kill()
        self._end()

    def leave(self) -> int:
        """End as a program does; the exit status."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._end()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def _end(self) -> int:
        status = self._process.wait(DEADLINE)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        return status


class Handle:
    """An object in the puppet: ``handle.join("worker")`` is done there."""

    def __init__(self, puppet: Puppet, name: str, made: Any) -> None:
        self.puppet = puppet
        self.made = made  # a fork's process
        self._name = name

    def tell(self, method: str, *arguments: Any) -> None:
        """Begin ``method``; its result comes from :meth:`Puppet.hear`."""
        self.puppet.tell(self._name, method, arguments)

    def __getattr__(self, method: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.tell(method, *arguments)
            return self.puppet.hear()

        return call


def main() -> None:
    from testbed.process.asker import Asker
    from testbed.process.peers import Peer

    from kvhold.client.embedded import Embedded

    made: dict[str, Any] = {}
    for line in sys.stdin:
        name, method, arguments = json.loads(line)
        try:
            result = None
            if method == "peer":
                made[name] = Peer(*arguments)
            elif method == "asker":
                made[name] = Asker(*arguments)
            elif method == "embedded":
                made[name] = Embedded([Path(arguments[0])], arguments[1], False, None, *arguments[2:])
            elif method == "fork":
                result = os.fork()
                while not result:
                    signal.pause()
            else:
                result = getattr(made[name], method)(*arguments)
        except Exception as error:  # noqa: BLE001 - the test's to judge
            result = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
