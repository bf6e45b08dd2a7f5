"""vLLM's scheduler as a pure function."""
