"""What one half of an engine counts about its cache.

Identity: ``tokens_asked = tokens_hit + sum of tokens_missed_*``. A token is asked about once per admission of its
request: those of full blocks beyond the engine's own hit, the last prompt token excepted.
"""

from collections.abc import Iterable

from kvhold.threads import ENGINE, belongs_to

MISSES = (
    "not_stored",
    "budget",
    "too_large",
    "detached",
    "deadline",
    "read_failed",
    "out_of_service",
    "remote_late",
    "remote_down",
    "load_failed",
    "lora",
    "ambiguous",
    "cancelled",
    "error",
)

METRICS = {
    "lookups": "Requests that asked for their prefix.",
    "tokens_asked": "Prompt tokens asked for, beyond the engine's own hit.",
    "tokens_hit": "Of those, tokens that a restore was planned for.",
    "tokens_withheld": "Of those, tokens computed all the same, because restoring them could stop the engine's queue.",
    **{f"tokens_missed_{reason}": f"Of those, tokens missed for the reason {reason}." for reason in MISSES},
    "tokens_cut": "Of the tokens missed, those after a block that this cache group lacked.",
    "loads": "Restores that ended.",
    "load_failures": "Of those, restores that failed; their requests were recomputed.",
    "load_bytes": "Bytes restored, over all ranks.",
    "load_seconds": "Seconds that restores took, queueing included.",
    "publishes": "Publish batches that ended.",
    "publish_failures": "Of those, batches that failed.",
    "publish_bytes": "Bytes published, over all ranks.",
    "publish_seconds": "Seconds that publishes took.",
    "publishes_stalled": "Publish batches that took longer than a minute.",
    "blocks_published": "Blocks handed to the manager.",
    "blocks_without_credit": "Blocks not published when they were ready, for lack of granted slots.",
    "blocks_over_hold_budget": "Blocks not published when they were ready, for too many held blocks.",
    "scheduler_wait_seconds": "Seconds that the scheduler thread waited for the manager.",
    "step_budget_exhausted": "Waits that used up a step's budget.",
    "answers_overdue": "Questions given up because the answer did not come in time.",
}


LABELS = {
    "group": ("tokens_cut", "blocks_published", "blocks_without_credit"),
    "rank": ("load_bytes", "load_seconds", "publish_bytes", "publish_seconds"),
}
"""Which metrics have which label besides the engine's own."""
LABEL_OF = {name: label for label, names in LABELS.items() for name in names}


@belongs_to(ENGINE)
class Accounts:
    """Counters since the last report; ``data`` has only names of :data:`METRICS`, with ``/<value>`` for a label's."""

    def __init__(self) -> None:
        self.data: dict[str, float] = {}

    def add(self, name: str, value: float = 1, **labels: int) -> None:
        if value:
            key = "/".join((name, *map(str, labels.values())))
            self.data[key] = self.data.get(key, 0) + value

    def begin(self, label: str, values: Iterable[int]) -> None:
        """Have counters with this label be there, as 0, before they count anything: then they have a rate."""
        self.data |= {f"{name}/{value}": 0 for name in LABELS[label] for value in values}

    def take(self) -> dict[str, float]:
        """What was counted since the last call."""
        taken, self.data = self.data, {}
        return taken
