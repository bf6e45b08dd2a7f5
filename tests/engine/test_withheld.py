"""What the scheduler half makes of docs/admission.md: a restore that could stop the engine is computed instead."""

from pathlib import Path

from testbed.engine.bed import generate, prompt
from testbed.engine.kvhold_bed import counting, scheduler_side, serving
from testbed.process.manager_process import Manager

from kvhold.engines.vllm.admission import Waiting

PROMPT = [prompt(400, 77)]
LATER = (1 << 40, 0.0, "later")


def test_a_restore_that_could_block_is_withheld_and_then_allowed(llama_dir: Path, manager: Manager) -> None:
    with serving(llama_dir, manager) as llm:
        admission = scheduler_side(llm).restores._admission
        computed = generate(llm, PROMPT)
        assert llm.reset_prefix_cache()
        admission._ordered = True
        admission._waiting["later"] = Waiting(LATER, admission._pool_blocks - 5)
        with counting() as counts:
            withheld = generate(llm, PROMPT)
        assert (withheld, withheld[0].cached) == (computed, 0)
        assert counts["tokens_withheld"] == counts["tokens_hit"] == 384
        assert llm.reset_prefix_cache()
        admission._waiting["later"] = Waiting(LATER, admission._pool_blocks - 20)
        restored = generate(llm, PROMPT)
        assert (restored, restored[0].cached) == (computed, 384)
        assert set(admission._waiting) == {"later"}, "who has begun to compute waits for nothing"


def test_a_restore_leaves_room_for_a_decoding_step(llama_dir: Path, manager: Manager) -> None:
    """Of the pool's thirteen blocks; the prompt fills twelve, and a step with its drafts takes two."""
    drafts = {"method": "ngram", "num_speculative_tokens": 40, "prompt_lookup_max": 3}
    small = {"max_model_len": 416, "num_gpu_blocks_override": 14}
    with serving(llama_dir, manager, speculative_config=drafts, **small) as llm:
        computed = generate(llm, PROMPT)
        assert llm.reset_prefix_cache()
        restored = generate(llm, PROMPT)
        assert (restored, restored[0].cached) == (computed, 352)
