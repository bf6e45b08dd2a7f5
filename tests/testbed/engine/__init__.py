"""vLLM engines on the CPU, models for them, and what is asked of kvhold in them."""

import testbed.engine.bed  # noqa: F401 - the environment of vLLM and torch, before anything here imports them
