"""The scheduler half's sessions, and the engine's steps, between which alone another one is taken up."""

import time
from collections import deque
from collections.abc import Callable

from kvhold.client.attacher import Attacher, Half
from kvhold.client.budget import Budget
from kvhold.client.channel import Channel
from kvhold.client.control import SILENT_SECONDS, Control
from kvhold.engines.common.accounts import Accounts
from kvhold.engines.common.ranks import agree
from kvhold.engines.common.settings import Settings
from kvhold.protocol import Hello, Retire
from kvhold.threads import ATTACHER, ENGINE, belongs_to

_FIRST_ATTACH_SECONDS = 10.0
"""How long the engine's start waits for the first session."""
_READY_SECONDS = 5.0
"""How long it then waits for the manager's word that all workers are there, so that the first request is served."""


@belongs_to(ENGINE, but={ATTACHER: ("hello", "attached", "readable", "tick")})
class SchedulerSession:
    """The session of the engine ``instance``, of ``world`` ranks, with whatever manager what ``attach`` makes finds.

    On the scheduler's thread, but for what the attacher calls.
    """

    def __init__(
        self, instance: str, world: int, label: str, attach: Callable[[Half], Attacher], settings: Settings
    ) -> None:
        self.step = 0
        """The last step that was planned."""
        self._introduction = instance, 0, world, label
        self._in_step = False
        self._reported = 0.0, 0
        self._old_tokens: deque[int] = deque(maxlen=64)
        self._attacher = attach(self)
        deadline = settings.answer_deadline_ms
        silent = max(SILENT_SECONDS, deadline / 1e3 if deadline is not None else 0.0)
        self.control = Control(self._attacher, settings.read_deadline_ms / 1e3, silent)
        self.budget = Budget(settings.step_budget_ms / 1e3)

    def start(self) -> None:
        """Begin to attach, and wait a while for the first session."""
        self._attacher.start(_FIRST_ATTACH_SECONDS)

    # --- for the attacher, on its thread --------------------------------------------------------------------------

    def hello(self) -> Hello:
        # The attacher has taken the old session away before it asks; a step that is under way may still use it.
        return Hello("scheduler", *self._introduction, self.step + 1 if self._in_step else self.step)

    def attached(self, channel: Channel) -> None:
        for token in self._old_tokens:  # all of them: the word may have been lost with the session that carried it
            channel.send(Retire(token))
        self._old_tokens.append(channel.welcome.token)

    def readable(self, channel: Channel) -> None:
        raise AssertionError("the scheduler's thread reads")

    def tick(self, channel: Channel) -> bool:
        return False

    # --- on the scheduler's thread ------------------------------------------------------------------------------

    def await_workers(self) -> None:
        """Wait a while for the workers' word on their KV. Raises ValueError, listing them, when they disagree."""
        end = time.monotonic() + _READY_SECONDS
        while self._attacher.channel is not None and time.monotonic() < end:
            self.control.take_up()
            if self.control.attachment:
                agree(self.control.reports)
                break
            self.control.pump(0.01)

    def begin_step(self) -> None:
        """Something is asked or planned for the next step, for the first time or again."""
        if not self._in_step:
            self._in_step = True  # before the session is looked at: see hello()
            self.budget.renew()
            self.control.take_up()

    def number_step(self) -> int:
        """The next step has its plan; its number."""
        self.step += 1
        return self.step

    def end_step(self) -> None:
        """Nothing more is planned in this step."""
        self._in_step = False

    def count_waits(self, accounts: Accounts) -> None:
        """Count how long, and how often for all of a step's budget, was waited since the last call."""
        waited, exhausted = self._reported
        self._reported = self.budget.waited, self.budget.exhausted
        accounts.add("scheduler_wait_seconds", self.budget.waited - waited)
        accounts.add("step_budget_exhausted", self.budget.exhausted - exhausted)

    def stop(self) -> None:
        self._attacher.write_out()
        self._attacher.stop(self.control.bye)
