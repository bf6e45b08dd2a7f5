"""SGLang's plugin entry point. It runs in every SGLang process, also of people who never use kvhold."""

import sys


def register() -> None:
    """Have a scheduler process tell kvhold of weight updates; does nothing more and never raises."""
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return  # no scheduler will run here, and to load it for nothing takes seconds
    try:
        from kvhold.engines.sglang import updates

        updates.register()
    except Exception:  # noqa: BLE001 - an SGLang that we do not know: the storage itself says so
        return
