"""Break the core in many ways, one at a time, and see which test notices.

    python tests/mutations/run.py [--jobs N] [--seconds S] [NAME...]

Each mutation replaces one passage of a copy of ``src/kvhold/core``, which must be there exactly once: a mutation that
does not apply any more is an error, not a pass. The tests run against the copy, the fast ones first, and stop at the
first that fails. A mutation that no test notices is a finding.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
STAGES: Final = ("tests/unit/core", "tests/exhaustive/test_small_worlds.py", "tests/property/test_core_model.py")
"""From the fastest to the slowest."""


@dataclass(frozen=True)
class Mutation:
    """``breaks`` is the rule that does not hold any more."""

    name: str
    file: str
    old: str
    new: str
    breaks: str


MUTATIONS: Final = (
    # --- leases and slots
    Mutation(
        "a release is dropped",
        "queries.py",
        "                self._catalogue.release(batch)\n",
        "",
        "what nobody leases is held by nobody",
    ),
    Mutation(
        "a slot is reused under a lease",
        "recency.py",
        "            if state[row] == State.RESIDENT:\n",
        "            if state[row] in (State.RESIDENT, State.LEASED):\n",
        "leased bytes stay",
    ),
    Mutation(
        "a lease is lost when its row is passed over",
        "recency.py",
        "        self.passed += 1\n",
        "        self.passed += 1\n        self._rows.leases[row] = max(0, self._rows.leases[row] - 1)\n",
        "leased bytes stay",
    ),
    Mutation(
        "a purge frees leased bytes",
        "catalogue.py",
        "        elif self.leases[row]:\n            self.move(row, State.DOOMED)\n",
        "        elif state == State.LOADING:\n            self.move(row, State.DOOMED)\n",
        "leased bytes stay",
    ),
    Mutation(
        "a release of another revision counts",
        "queries.py",
        "            if operation is not None and operation.revision == revision:\n",
        "            if operation is not None:\n",
        "a late word about one revision does not touch another",
    ),
    Mutation(
        "a lease expires after its restore started",
        "queries.py",
        "            self._leases.end(operation)\n            self._unheard.end(operation)\n"
        "            self._restores.begin",
        "            self._restores.begin",
        "only its owner's word ends a restore",
    ),
    Mutation(
        "an unused answer never expires",
        "queries.py",
        "        return self._leases.overdue(now - limits.lease_ns) or ",
        "        return self._leases.overdue(-1) or ",
        "unused leases end",
    ),
    # --- sessions
    Mutation(
        "a closed socket counts as a death",
        "state.py",
        "            attachment.limbo.add(session_id)\n            return effects\n",
        "            attachment.limbo.add(session_id)\n",
        "what a lost owner may still touch is not given away",
    ),
    Mutation(
        "a dead engine keeps its leases",
        "state.py",
        "        yield from self.queries.settle(attachment)\n",
        "",
        "nothing is held once all owners are gone",
    ),
    Mutation(
        "a dead engine's worker is not waited for",
        "state.py",
        "        if not attachment.sessions:\n            del self.attachments",
        "        if attachment.id in self.attachments:\n            del self.attachments",
        "bytes stay until every half is proved gone",
    ),
    # --- credits and commits
    Mutation(
        "a commit with an old epoch counts",
        "credits.py",
        "            if row not in credits or catalogue.epoch[row] != epoch:\n",
        "            if row not in credits:\n",
        "a late commit does not touch the slot's next use",
    ),
    Mutation(
        "a commit of another engine's slot counts",
        "credits.py",
        "            if row not in credits or catalogue.epoch[row] != epoch:\n",
        "            if catalogue.epoch[row] != epoch or catalogue.state[row] != State.CREDIT:\n",
        "a slot is its owner's",
    ),
    Mutation(
        "a return with an old epoch counts",
        "credits.py",
        "            if number is None or self._catalogue.epoch[row] != epoch:\n",
        "            if number is None:\n",
        "a late return does not touch the slot's next use",
    ),
    Mutation(
        "a committed slot stays a credit",
        "credits.py",
        "            credits.discard(row)\n            if known is not None",
        "            if known is not None",
        "a slot is committed once",
    ),
    Mutation(
        "more is granted than a space's share",
        "credits.py",
        "            missing = max(0, self.target(attachment, space) - len(space.credits))\n",
        "            missing = self.target(attachment, space)\n",
        "credits are bounded",
    ),
    Mutation(
        "slots that were put off for want of time are not looked for",
        "credits.py",
        "        self._freed = -1 if more else catalogue.freed  ",
        "        self._freed = catalogue.freed  ",
        "nobody waits for slots that are free",
    ),
    Mutation(
        "a commit without a shard is taken",
        "credits.py",
        "        if space is None or not whole or event.shards != space.index.shards:\n",
        "        if space is None or not whole:\n",
        "an object is every shard in full",
    ),
    Mutation(
        "a duplicate keeps its slot",
        "credits.py",
        '                catalogue.free(row)\n                counters["duplicates"] += 1\n',
        '                counters["duplicates"] += 1\n',
        "bytes reconcile",
    ),
    # --- questions
    Mutation(
        "an answer of an old revision is given",
        "queries.py",
        "        operation.phase = Phase.OVER\n",
        "",
        "an old revision is not answered",
    ),
    Mutation(
        "an old revision keeps its leases",
        "queries.py",
        "        return self._end(former, Kind.SUPERSEDED) if former is not None else None\n",
        "        return None\n",
        "a new revision releases what the old one held",
    ),
    Mutation(
        "a part of a prepared whole is an answer",
        "queries.py",
        "        whole = operation.exact and bool(reason or cut is not None)\n",
        "        whole = operation.exact and cut is not None\n",
        "all or nothing",
    ),
    Mutation(
        "a question that waits has no deadline",
        "queries.py",
        "            if operation := self._answers.overdue(now - limits.answer_ns):\n",
        "            if operation := self._answers.overdue(-1):\n",
        "every question is answered",
    ),
    Mutation(
        "what failed to load is not quarantined on disk",
        "queries.py",
        "                yield self.storage.forget(names) if names else []\n",
        "                yield []\n",
        "a bad object is not found again",
    ),
    Mutation(
        "what the engine has itself is leased",
        "queries.py",
        "for number, keys in event.parts]\n        used",
        "for number, keys in (*event.parts, *event.used)]\n        used",
        "only what was asked for is held",
    ),
    Mutation(
        "what the engine has itself ages",
        "queries.py",
        "            catalogue.touch([row for _, row in found], index)\n",
        "",
        "what lives in an engine's memory stays",
    ),
    # --- events
    Mutation(
        "nobody is told what is gone",
        "catalogue.py",
        "            self.gone.append((index, key))\n",
        "            pass\n",
        "who watches knows what can be found",
    ),
    Mutation(
        "what was not kept is told as stored",
        "credits.py",
        "        found = [key for key in keys if space.index.get(key) is not None]\n",
        "        found = list(keys)\n",
        "who watches knows what can be found",
    ),
    Mutation(
        "going to a log alone is told as a removal",
        "catalogue.py",
        "        self.note(Kind.COOLED, row)\n",
        "        self.note(Kind.COOLED, row)\n"
        "        self.gone.append((self.indexes[self.owner[row]], self.key[row]))\n",
        "who watches knows what can be found",
    ),
    Mutation(
        "what is gone is told after the answer",
        "queries.py",
        "        departed, effects = self._common.departed(), list[Effect]()\n",
        "        departed, effects = list[Effect](), list[Effect]()\n",
        "events come in the order of what happened",
    ),
    Mutation(
        "who closed a space is told of it",
        "credits.py",
        "        self._unwatch(space)\n        self._spaces",
        "        self._spaces",
        "only who watches is told",
    ),
    Mutation(
        "a listing passes over what was given another row",
        "listing.py",
        "    row = row if moves == now else 0\n",
        "",
        "what can be found is listed",
    ),
    # --- budgets
    Mutation(
        "the share of prepared bytes is ignored",
        "queries.py",
        "        room = min(int(all_may) - held, int(own_may) - operation.attachment.prepared)\n",
        "        room = int(own_may) - operation.attachment.prepared\n",
        "prepared bytes are bounded",
    ),
    Mutation(
        "an engine's share is ignored",
        "queries.py",
        "        room = min(int(all_may) - held, int(own_may) - operation.attachment.prepared)\n",
        "        room = int(all_may) - held\n",
        "one engine's prepared bytes are bounded",
    ),
    Mutation(
        "the speculative share is ignored",
        "queries.py",
        "        if operation.ahead:\n            share = limits",
        "        if operation.exact and not operation.exact:\n            share = limits",
        "what is asked ahead of need is bounded",
    ),
    Mutation(
        "a charge is not returned",
        "queries.py",
        "        self._charge(operation, -operation.charged)\n        parts",
        "        parts",
        "every charge is returned once",
    ),
    Mutation(
        "the number of open questions is not bounded",
        "queries.py",
        "        crowded = attachment.answering - pending >= limits.queries or ",
        "        crowded = ",
        "questions of one engine are bounded",
    ),
    Mutation(
        "a namespace's limit is ignored",
        "catalogue.py",
        "            if owner.used + size <= owner.quota.limit:\n                break\n",
        "            break\n",
        "a quota is not exceeded",
    ),
    Mutation(
        "a namespace's floor is ignored",
        "catalogue.py",
        "            return owner is not asking and owner.used <= owner.quota.floor\n",
        "            return False\n",
        "a namespace keeps its floor",
    ),
    Mutation(
        "max_objects is ignored",
        "credits.py",
        "            elif catalogue.objects >= limit and not catalogue.forget_one():\n",
        "            elif limit < 0:\n",
        "known objects are bounded",
    ),
    Mutation(
        "the keys of one engine's questions are not bounded",
        "queries.py",
        " or named > limits.keys:\n",
        ":\n",
        "what one engine's questions take is bounded",
    ),
    Mutation(
        "spaces that nobody has open are kept for ever",
        "credits.py",
        "                forgotten = self._common.start(self._forget(unused), event.session)\n",
        "",
        "known spaces are bounded",
    ),
    # --- turns
    Mutation(
        "one session's work is done before all others'",
        "turns.py",
        "        self._pieces.move_to_end(owner)\n",
        "",
        "turns are fair",
    ),
    Mutation(
        "questions of who is gone are answered",
        "state.py",
        "        self.common.turns.forget(session_id)\n",
        "",
        "nothing is done for who is gone",
    ),
    Mutation(
        "a lease ends before its owner was heard",
        "queries.py",
        "                if operation.session in event.behind:\n",
        "                if operation.session in ():\n",
        "what was said before a lease's end counts",
    ),
    # --- recency
    Mutation(
        "a chain is evicted from its head",
        "recency.py",
        "        for first, last in reversed(pieces):\n",
        "        for first, last in pieces:\n",
        "chains go from their ends",
    ),
    Mutation(
        "what nobody can reach is kept",
        "credits.py",
        "    return index.chain and bool(before) and index.get(before) is None\n",
        "    return False\n",
        "what cannot be reached goes first",
    ),
    Mutation(
        "what windows need is not kept without what comes before it",
        "credits.py",
        "    return index.chain and bool(before) and index.get(before) is None\n",
        "    return bool(before) and index.get(before) is None\n",
        "only chains need what comes before",
    ),
    Mutation(
        "what follows a lost object goes in its turn",
        "catalogue.py",
        "        self._strand(row)\n",
        "",
        "what cannot be reached goes first",
    ),
    # --- reads
    Mutation(
        "what is skipped is leased and read",
        "queries.py",
        "            ahead = max(0, part.skip - start)\n",
        "            ahead = 0\n",
        "what was not chosen is not read",
    ),
    Mutation(
        "a part is read of what cannot be had whole",
        "queries.py",
        "            if operation.exact:\n                return 0, reason  #",
        "            if operation.exact and not rows:\n                return 0, reason  #",
        "what cannot be used is not read",
    ),
    Mutation(
        "a failed read is served",
        "reads.py",
        "            if position not in failed:\n",
        "            if position not in failed or not io.cancelled:\n",
        "right bytes or a miss",
    ),
    Mutation(
        "a failed read stays charged",
        "reads.py",
        "        self.bytes -= io.bytes\n",
        "        self.bytes -= 0 if failed else io.bytes\n",
        "every I/O's charge is returned",
    ),
    Mutation(
        "a second completion counts again",
        "storage.py",
        "        io = self.ios.pop(event.io, None)\n",
        "        io = self.ios.get(event.io)\n",
        "every I/O ends once",
    ),
    Mutation(
        "one owner's cancel unqueues what another waits for",
        "reads.py",
        "            if catalogue.leases[row] != 1:\n                continue\n            if row in self.queued",
        "            if row in self.queued",
        "a cancel touches nobody else",
    ),
    Mutation(
        "one owner's cancel stops a read that another waits for",
        "reads.py",
        "not io.cancelled and all(catalogue.leases[r] == 1 for r in io.rows):\n",
        "not io.cancelled:\n",
        "a cancel touches nobody else",
    ),
    Mutation(
        "who waits for a failed read is not told",
        "reads.py",
        "                arrived.append((row, False))\n                catalogue.spoiled(row)\n",
        "                catalogue.spoiled(row)\n",
        "every question is answered",
    ),
    # --- logs
    Mutation(
        "a segment is reclaimed while it is read",
        "segments.py",
        "        idle = [segment for segment in self.sealed if not segment.readers]\n",
        "        idle = list(self.sealed)\n",
        "nothing is reused under a reader",
    ),
    Mutation(
        "an object of a reclaimed segment is found again",
        "writes.py",
        "                if catalogue.state[row] == State.COLD:\n                    catalogue.remove(row)\n",
        "                if catalogue.state[row] == State.COLD:\n                    pass\n",
        "an old life's records are gone",
    ),
    Mutation(
        "a row is evicted while it is written",
        "writes.py",
        "            batch.bytes += length\n            catalogue.lease([row])\n",
        "            batch.bytes += length\n",
        "an I/O holds its slots",
    ),
    Mutation(
        "another object is written in a slot's old name",
        "writes.py",
        "            alive = catalogue.epoch[row] == dirty.epoch and ",
        "            alive = ",
        "what waits to be written is what it was",
    ),
    Mutation(
        "a failed write leaves a gap",
        "writes.py",
        "        device.log.rewind(segment, io.places[good], len(io.rows) - good)\n",
        "",
        "records are without gaps",
    ),
    Mutation(
        "a purged object gets a place in the log",
        "catalogue.py",
        "        if self.state[row] == State.LEASED and not self.place[row]:\n",
        "        if not self.place[row]:\n",
        "what was purged is not found again",
    ),
    Mutation(
        "a purge misses what is read meanwhile",
        "state.py",
        "                if covered or slot_is_old:\n",
        "                if slot_is_old:\n",
        "what was purged is not found again",
    ),
)


def core(root: Path) -> Path:
    return root / "src" / "kvhold" / "core"


def check(mutations: tuple[Mutation, ...] = MUTATIONS, root: Path = ROOT) -> list[str]:
    """Which mutations cannot be applied, and why."""
    wrong = []
    for mutation in mutations:
        count = (core(root) / mutation.file).read_text().count(mutation.old)
        if count != 1:
            wrong.append(f"{mutation.name}: its passage is {count} times in {mutation.file}")
    return wrong


def copy(to: Path, root: Path = ROOT) -> None:
    """What the tests of the core need, so that nobody's edits get in between."""
    ignore = shutil.ignore_patterns("__pycache__", ".*")
    shutil.copytree(root / "src", to / "src", ignore=ignore)
    shutil.copytree(root / "tests", to / "tests", ignore=ignore)
    shutil.copy(root / "pyproject.toml", to / "pyproject.toml")


def failing(place: Path, stage: str, seconds: float) -> str | None:
    """The first test of a stage that fails, or None."""
    environment = dict(
        os.environ,
        PYTHONPATH=str(place / "src"),
        PYTHONDONTWRITEBYTECODE="1",
        KVHOLD_SEARCH_SECONDS="1",
    )
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", stage]
    try:
        result = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"{stage}: no end within {seconds:.0f} s"
    if result.returncode == 0:
        return None
    lines = [line for line in result.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if result.returncode != 1 or not lines or lines[0].startswith("ERROR"):
        raise RuntimeError(f"{stage} could not be run:\n{result.stdout[-3000:]}{result.stderr[-3000:]}")
    return lines[0].removeprefix("FAILED ").split(" - ")[0]


def uses_copy(place: Path) -> bool:
    """Whether a test there imports the copy and not what is installed."""
    code = "import kvhold.core; print(kvhold.core.__file__)"
    environment = dict(os.environ, PYTHONPATH=str(place / "src"))
    where = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return where.stdout.strip().startswith(str(place))


def attempt(mutation: Mutation, pristine: Path, stages: tuple[str, ...], seconds: float) -> tuple[str | None, float]:
    """Which test caught a mutation, if any, and after how long."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        copy(place, pristine)
        file = core(place) / mutation.file
        file.write_text(file.read_text().replace(mutation.old, mutation.new))
        compile(file.read_text(), mutation.file, "exec")
        caught = next((test for stage in stages if (test := failing(place, stage, seconds))), None)
    return caught, time.monotonic() - start


def run(
    mutations: tuple[Mutation, ...],
    stages: tuple[str, ...] = STAGES,
    seconds: float = 900,
    jobs: int = 1,
    told: Callable[[str], None] = print,
) -> list[Mutation]:
    """The mutations that survive."""
    with tempfile.TemporaryDirectory() as folder:
        pristine = Path(folder)
        copy(pristine)
        if wrong := check(mutations, pristine):
            raise SystemExit("\n".join(wrong))
        if not uses_copy(pristine):
            raise SystemExit("the tests would run against what is installed")
        for stage in stages:
            if test := failing(pristine, stage, seconds):
                raise SystemExit(f"without any mutation, this fails: {test}")
        told("| mutation | breaks | caught by | seconds |\n|---|---|---|---|")
        survivors = []
        with ThreadPoolExecutor(jobs) as pool:
            results = pool.map(lambda mutation: attempt(mutation, pristine, stages, seconds), mutations)
            for mutation, (caught, took) in zip(mutations, results, strict=True):
                told(f"| {mutation.name} | {mutation.breaks} | {caught or '**nothing**'} | {took:.1f} |")
                if caught is None:
                    survivors.append(mutation)
        told(f"\n{len(mutations) - len(survivors)} of {len(mutations)} were caught")
    return survivors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only these mutations (any part of a name)")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=900, help="limit of one stage")
    parser.add_argument("--stages", type=int, default=len(STAGES), help="only the first so many kinds of tests")
    options = parser.parse_args()
    chosen = tuple(m for m in MUTATIONS if not options.names or any(name in m.name for name in options.names))
    survivors = run(
        chosen,
        STAGES[: options.stages],
        options.seconds,
        options.jobs,
        lambda line: print(line, flush=True),
    )
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
