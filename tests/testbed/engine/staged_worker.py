"""A worker with which a CPU engine can have pipeline stages. vLLM imports it in processes of its own."""

import os
import random
from typing import Any

from testbed.engine.families import weights
from testbed.engine.fuzz import Chaos
from vllm.distributed import get_pp_group
from vllm.v1.worker.cpu_worker import CPUWorker

CHAOS = "KVHOLD_TEST_CHAOS"
"""Names a file: as long as it is there, copies fail and are late at random, on each rank at other times."""


class StagedWorker(CPUWorker):
    """vLLM 0.32 makes the buffers for what a stage takes in a warm-up that its CPU worker leaves out."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._weights = weights()
        self._weights.__enter__()  # as long as the process lives
        super().__init__(*arguments, **options)
        self._file = os.environ.get(CHAOS)
        self._rng = random.Random(self.rank)
        self._chaos = Chaos(self._rng) if self._file else None

    def load_model(self, *arguments: Any, **options: Any) -> None:
        super().load_model(*arguments, **options)
        runner = self.model_runner
        if not get_pp_group().is_first_rank:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

    def execute_model(self, *arguments: Any) -> Any:
        if self._chaos is not None:
            if not os.path.exists(self._file or ""):
                self._chaos.end()
            elif self._rng.random() < 0.05:
                self._chaos.turn()
        return super().execute_model(*arguments)
