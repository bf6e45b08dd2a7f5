"""An engine's session, as far as it tells from it whether its manager runs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from testbed.process.peers import KEY_BYTES, NAMESPACE, SHARD, Peer, keys_of, until

from kvhold import protocol as wire
from kvhold.client.channel import Channel
from kvhold.client.control import Control, Geometry


class Asker:
    """It never reads an answer, and takes a manager to be silent until it sees a turn of it: the page is all it has."""

    def __init__(self, path: str) -> None:
        attacher: Any = SimpleNamespace(channel=Channel(Path(path), wire.Hello("scheduler", "one"), 60.0))
        self._control = Control(attacher, 0.0, silent_seconds=0.0)
        self._worker = Peer(path)
        self._worker.join("worker", "one")
        self._worker.map()
        until(self._attached, "the engine is attached")
        self._control.open(1, Geometry(NAMESPACE, 0, KEY_BYTES, (SHARD,)), 0)

    def _attached(self) -> bool:
        self._control.take_up()
        return self._control.attachment > 0

    def ask(self) -> None:
        self._control.ask(1, 0, keys_of([1, 2, 3]))

    def silent(self) -> bool:
        return self._control.silent
