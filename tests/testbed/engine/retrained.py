"""A worker whose weights a trainer changes while it runs. vLLM imports it in processes of its own."""

from typing import Any

import torch


class Retrained:
    """What vLLM makes a base of its worker's class with ``worker_extension_cls``."""

    rank: int
    model_runner: Any

    def retrain(self, rank: int, scale: float) -> None:
        """Have the weights of one rank be others; a scale of 1 is what the bed's models begin with."""
        if self.rank == rank:
            with torch.no_grad():
                for layer in self.model_runner.model.model.layers:
                    layer.input_layernorm.weight.fill_(scale)
