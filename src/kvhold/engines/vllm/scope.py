"""Of which spaces the KV of a request is: where it may be found, and where it may be stored."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvhold.engines.common.spaces import Spaces
from kvhold.engines.vllm.adapters import adapter_of
from kvhold.engines.vllm.hashes import tell_all
from kvhold.engines.vllm.outdated import Outdated
from kvhold.threads import ENGINE, belongs_to

if TYPE_CHECKING:
    import torch
    from vllm.v1.request import Request


@belongs_to(ENGINE)
class Scope:
    """The scope of each request of a model that computes in ``dtype``; ``outdated`` once the engine has its cache."""

    def __init__(self, spaces: Spaces, dtype: "torch.dtype") -> None:
        self.outdated: Outdated | None = None
        self._spaces = spaces
        self._dtype = dtype

    def is_told(self, request: "Request") -> bool:
        """Whether the request's block hashes tell its KV from all other."""
        return tell_all(request, self._dtype)

    def of(self, request: "Request") -> Sequence[int] | None:
        """The spaces that what is computed for ``request`` may be stored in; None as long as there are none."""
        if not self._spaces.opened or (self.outdated is not None and self.outdated.has(request.request_id)):
            return None
        if not self.is_told(request):
            return None
        return self._spaces.of(adapter_of(request.lora_request))
