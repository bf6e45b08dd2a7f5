"""Which spaces the KV of a request belongs to."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvhold.engines.common.spaces import Spaces
from kvhold.engines.vllm.adapters import adapter_of
from kvhold.engines.vllm.hashes import tell_all
from kvhold.engines.vllm.outdated import Outdated
from kvhold.threads import ENGINE, belongs_to

if TYPE_CHECKING:
    import torch
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request


@belongs_to(ENGINE)
class RequestSpaces(Spaces):
    """Spaces of one engine, and which of them are a request's. ``outdated`` is there once the engine has its cache."""

    outdated: Outdated | None = None

    def bind(self, pool: "BlockPool", groups: int, dtype: "torch.dtype") -> None:
        """The engine has its ``pool`` of blocks of ``groups`` cache groups, and its model computes in ``dtype``."""
        self.outdated = Outdated(pool, range(groups))
        self._dtype = dtype

    def tell(self, request: "Request") -> bool:
        """Whether the request's block hashes tell its KV from all other."""
        return tell_all(request, self._dtype)

    def to_store(self, request: "Request") -> Sequence[int] | None:
        """Those that what is computed for ``request`` may be stored in; None as long as there are none."""
        if not self.opened or (self.outdated is not None and self.outdated.has(request.request_id)):
            return None
        if not self.tell(request):
            return None
        return self.of(adapter_of(request.lora_request))
