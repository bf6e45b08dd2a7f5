"""How one engine's ranks are numbered, and which of them hold the same KV."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ParallelConfig


@dataclass(frozen=True, slots=True)
class Topology:
    """The ranks of one engine: pipeline stages of ``prefill`` x ``tensor`` ranks, the tensor-parallel rank fastest.

    ``prefill`` ranks share the work of a prompt (prefill context parallelism), and each ends up with the KV of all of
    it. ``decode`` ranks of a stage share its tokens (decode context parallelism): they are taken in the order in which
    the prefill rank is the fastest. Source: ``vllm.distributed.parallel_state.initialize_model_parallel`` and
    ``vllm.v1.worker.gpu.pcp_manager``, vLLM 0.32 and 0.33.
    """

    tensor: int
    prefill: int
    decode: int
    stages: int

    @classmethod
    def of(cls, parallel: "ParallelConfig") -> "Topology":
        return cls(
            parallel.tensor_parallel_size,
            parallel.prefill_context_parallel_size,
            parallel.decode_context_parallel_size,
            parallel.pipeline_parallel_size,
        )

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self._ranks_of_a_stage * self.stages

    @property
    def _ranks_of_a_stage(self) -> int:
        return self.tensor * self.prefill

    def stage(self, rank: int) -> int:
        """The pipeline stage of ``rank``."""
        return rank // self._ranks_of_a_stage

    def owner(self, rank: int, replicas: int, alike: bool) -> int:
        """The first rank that holds the same KV as ``rank``, so that its part of an object is stored once.

        ``replicas`` tensor-parallel ranks in a row hold the same heads. ``alike`` says that what a rank holds depends
        on its heads and its tokens alone, so that prefill ranks with the same of both hold the same.
        """
        in_stage = rank % self._ranks_of_a_stage
        parts = [self._part(other, replicas, alike) for other in range(in_stage + 1)]
        return rank - in_stage + parts.index(parts[in_stage])

    def parts(self, replicas: int, alike: bool) -> tuple[tuple[int, int, int], ...]:
        """The parts that a stage's ranks write of an object, in the order of those ranks."""
        return tuple(dict.fromkeys(self._part(rank, replicas, alike) for rank in range(self._ranks_of_a_stage)))

    def _part(self, rank: int, replicas: int, alike: bool) -> tuple[int, int, int]:
        """(heads, tokens, prefill rank where that matters): equal for ranks of a stage that hold the same KV."""
        prefill, tensor = divmod(rank, self.tensor)
        tokens = (tensor * self.prefill + prefill) % self.decode
        return tensor // replicas, tokens, 0 if alike else prefill
