"""Which of a request's tokens are restored, into which blocks, and what becomes of each restore."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kvhold.client.control import QuestionId
from kvhold.engines.common.doubt import Doubt
from kvhold.engines.common.groups import Group
from kvhold.engines.common.plans import Load
from kvhold.engines.common.question import Asker, LeasedBlocks, tokens_from_disk
from kvhold.engines.common.questions import Questions
from kvhold.engines.common.session import SchedulerSession
from kvhold.engines.vllm.adapters import adapter_of
from kvhold.engines.vllm.admission import Admission
from kvhold.engines.vllm.events import CacheEvents
from kvhold.engines.vllm.hits import HitSearch
from kvhold.engines.vllm.retention import Retention
from kvhold.engines.vllm.spaces import RequestSpaces
from kvhold.protocol import MAX_KEYS
from kvhold.threads import ENGINE, belongs_to

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = init_logger(__name__)


@dataclass(slots=True)
class Restore:
    """A restore that workers were told of: the lease of question ``id`` lives until they have ended it."""

    id: QuestionId | None
    attachment: int
    blocks: frozenset[int]
    from_disk: int = 0  # tokens
    failed: bool = False
    abandoned: bool = False  # its request is over


@belongs_to(ENGINE)
class Restores:
    """Restores of one engine, if they are ``wanted``. ``loads`` are those that workers have yet to be told of."""

    def __init__(
        self,
        session: SchedulerSession,
        groups: Sequence[Group],
        spaces: RequestSpaces,
        doubt: Doubt,
        asker: Asker,
        questions: Questions,
        admission: Admission,
        events: CacheEvents | None,
        wanted: bool,
    ) -> None:
        self.loads: list[Load] = []
        self._session = session
        self._control = session.control
        self._groups = groups
        self._spaces = spaces
        self._doubt = doubt
        self._asker = asker
        self._questions = questions
        self._admission = admission
        self._events = events
        self._wanted = wanted
        self._under_way: dict[str, Restore] = {}
        self._failed: set[str] = set()
        self._retention: Retention | None = None

    def bind(self, manager: "KVCacheManager", search: HitSearch, retention: Retention) -> None:
        """The engine has its block pool, and rules about hits."""
        self._retention = retention
        self._asker.bind(search, bool(manager.use_eagle))
        self._admission.bind(manager, retention)

    # --- before a request is admitted ---------------------------------------------------------------------------

    def matched_tokens(self, request: "Request", computed: int) -> tuple[int | None, bool]:
        """How many tokens beyond ``computed`` can be restored, leaving the last one to compute; None: ask again."""
        name = request.request_id
        self._session.begin_step()
        spaces, search, outdated = self._spaces.plain, self._asker.search, self._spaces.outdated
        if search is None or outdated is None:
            return 0, False
        outdated.admits(request)
        awaits_look = self._doubt.awaits_look()
        known = min(len(request.block_hashes), MAX_KEYS // len(self._groups)) * search.hash_tokens
        limit = self._admission.reachable(min(request.num_tokens - 1, known), search.unit)
        local = min(computed, limit)
        if not self._wanted or request.skip_reading_prefix_cache:
            local = limit  # nothing to restore, but what is there must not be published again
        elif name in self._failed:
            self._questions.miss(name, local, limit, "load_failed")
            return 0, False
        if limit == 0:
            return 0, False
        if not self._spaces.tell(request):
            self._questions.miss(name, local, limit, "ambiguous")
            return 0, False
        if awaits_look:
            return None, False
        if spaces is None:
            self._questions.miss(name, local, limit, "detached")
            return 0, False
        adapter = adapter_of(request.lora_request)
        if adapter is not None:
            sure = self._spaces.adapters.look(name, adapter)
            if sure is None and local < limit:
                self._session.budget.spend(self._spaces.adapters.wait)
                sure = self._spaces.adapters.look(name, adapter)
                if sure is None:
                    return None, False
            own = self._spaces.of(adapter) if sure else None
            if own is None:
                self._questions.miss(name, local, limit, "lora")
                return 0, False
            spaces = own
        found = self._questions.find(name, local, limit, spaces, request.block_hashes)
        if found is None:
            return None, False
        # The engine keeps windows and states where it sees prompts part. It sees its own memory only, so it is told.
        request.shared_prefix_boundary = max(request.shared_prefix_boundary, self._questions.junction(name))
        if found and self._admission.withholds(request, found, computed + found):
            return 0, False
        return found, found > 0

    # --- from its admission on ----------------------------------------------------------------------------------

    def begin(self, request: "Request", blocks: "KVCacheBlocks", external: int) -> None:
        """The engine has given ``request`` ``blocks``, and wants ``external`` tokens of its hit restored into them.

        What was promised and cannot be had any more is a load all the same: one that workers report as failed, so that
        the request is recomputed. Without one it would wait for ever.
        """
        tables = blocks.get_block_ids()
        self._admission.admitted(request, tables, external > 0)
        if external <= 0:
            self._questions.settle(request.request_id)
            return
        load = None
        try:
            load = self._take(request, tables, external)
        finally:
            if load is None:
                # Without those of its own that others share: they are not what was to be restored.
                mine = [block for table in blocks.get_unhashed_block_ids_all_groups() for block in table]
                load = Load(request.request_id, [], mine)
                self._under_way[request.request_id] = Restore(None, 0, frozenset(load.blocks))
            self.loads.append(load)

    def _take(self, request: "Request", tables: Sequence[list[int]], external: int) -> Load | None:
        name = request.request_id
        taken = self._questions.take(name, external)
        if taken is None:
            return None
        question, local, leased = taken
        if not self._covers(leased, tables, local, local + external):
            log.error("kvhold: the engine gave a restore other blocks than its hit needs, so the request is computed")
            self._control.release((question.id,))
            return None
        copies = [
            (one.group, [tables[self._groups[one.group].index][at] for at in one.blocks], one.offsets) for one in leased
        ]
        blocks = [block for _, mine, _ in copies for block in mine]
        sizes = [group.block_tokens for group in self._groups]
        from_disk = tokens_from_disk(leased, sizes, question.read, local, local + external)
        self._under_way[name] = Restore(question.id, self._control.attachment, frozenset(blocks), from_disk)
        if self._events is not None and self._retention is not None:
            spaces = self._spaces.of(adapter_of(request.lora_request))
            if spaces is not None:
                self._events.restored(request, spaces, leased, local + external, self._retention.key)
        return Load(name, copies, blocks)

    def _covers(self, leased: Sequence[LeasedBlocks], tables: Sequence[list[int]], local: int, end: int) -> bool:
        """Whether ``leased`` fill just the blocks that the engine has given for tokens ``local`` to ``end``."""
        filled = {one.group: set(one.blocks) for one in leased}
        for at, group in enumerate(self._groups):
            table, mine = tables[group.index], filled.get(at, set())
            given = {
                block
                for block in range(local // group.block_tokens, min(-(-end // group.block_tokens), len(table)))
                # A few blocks before the window are kept for a drafter; nothing attends to them.
                if table[block] and not (group.window and (block + 1) * group.block_tokens <= end - group.window + 1)
            }
            if given != mine:
                return False
        return True

    def has(self, request: str) -> bool:
        """Whether a restore of ``request`` is under way."""
        return request in self._under_way

    def tokens_from_disk(self, request: str) -> int:
        """Tokens of the restore that ``request`` was given blocks for which the manager read from SSD."""
        return self._under_way[request].from_disk if request in self._under_way else 0

    def ended(self, output: "KVConnectorOutput") -> set[int]:
        """Workers have ended restores; of the blocks that were not filled, those of no restore of ours."""
        others = set(output.invalid_block_ids or ())
        for each in self._under_way.values() if others else ():
            # The ranks of one restore may end, and fail, in different steps.
            each.failed = each.failed or not each.blocks.isdisjoint(output.invalid_block_ids)
            others -= each.blocks
        ended: list[QuestionId] = []
        for name in output.finished_recving or ():
            restore = self._under_way.pop(name, None)
            if restore is None:
                continue
            failed = restore.failed or name in output.failed_recving
            if restore.id is not None and restore.attachment == self._control.attachment:
                ended.append(restore.id)
                if failed:
                    self._control.restore_failed(restore.id)
            if failed and not restore.abandoned:
                self._failed.add(name)
                self._admission.failed(name)
        self._control.release(ended)
        return others

    def finished(self, request: str) -> None:
        """The request is over, however; a restore of it may still run, and is waited for."""
        self._admission.finished(request)
        self._failed.discard(request)
        if request in self._under_way:
            self._under_way[request].abandoned = True
