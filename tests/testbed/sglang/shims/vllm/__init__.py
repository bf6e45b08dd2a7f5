"""The three operators of vLLM that SGLang takes for Llama on a CPU, in plain torch."""
