"""kvhold keeps the KV cache of LLM engines outside the engine."""

__version__ = "0.1.0"
