"""vLLM's own scheduler over KV that is computed from tokens."""

import testbed.engine.bed  # noqa: F401 - the environment of vLLM and torch, before anything here imports them
