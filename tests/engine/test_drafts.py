"""Speculative decoding with a model of its own: the drafter's KV is kept with the target's."""

from pathlib import Path
from typing import Any

import pytest
from testbed.engine.bed import generate, prompt, reference, settle
from testbed.engine.families import weights
from testbed.engine.kvhold_bed import check_nothing_held, counting, free_blocks, serving, status, until
from testbed.engine.models import write_config
from testbed.process.manager_process import Manager

PROMPTS = [prompt(333, 1), prompt(256, 2), prompt(97, 3)]
METHODS: dict[str, dict[str, Any]] = {
    "eagle": {},
    "eagle3": {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 512, "target_hidden_size": 128},
    "draft_model": {},
}


def speculation(folder: Path, method: str, name: str = "drafter", **config: Any) -> dict[str, Any]:
    drafter = write_config(folder / name, "llama", num_hidden_layers=1, **METHODS[method], **config)
    return {"speculative_config": {"method": method, "model": str(drafter), "num_speculative_tokens": 2}}


@pytest.mark.parametrize("method", METHODS)
def test_restored_with_the_drafters_kv(tmp_path: Path, manager: Manager, method: str) -> None:
    """EAGLE's drafter has looked one token ahead at the end of a block, so the engine wants one block more proven."""
    with weights():
        target = write_config(tmp_path / "target", "llama", num_hidden_layers=8)
        expected = reference(target, PROMPTS, 20)
        options = speculation(tmp_path, method)
        with serving(target, manager, **options) as llm, counting() as counts:
            free = free_blocks(llm)
            for tokens, truth in zip(PROMPTS, expected, strict=True):
                cached = []
                for _ in range(2):
                    [output] = generate(llm, [tokens], 20)
                    assert output == truth
                    cached.append(output.cached)
                    settle(llm)
                    assert llm.reset_prefix_cache()
                dropped = 0 if method == "draft_model" else 1
                assert cached == [0, 32 * ((len(tokens) - 1) // 32 - dropped)]
            assert counts["loads"] == 3
            check_nothing_held(llm, free, manager.socket)
        with serving(target, manager, **options) as llm:  # another engine with the same drafter
            assert generate(llm, PROMPTS[:1], 20)[0].cached > 0
        other = speculation(tmp_path, method, "other", rms_norm_eps=1e-4)
        with serving(target, manager, **other) as llm:  # and with another one
            [output] = generate(llm, PROMPTS[:1], 20)
            assert output == expected[0]
            assert output.cached == 0
        until(lambda: not status(manager.socket)["instances"], "the manager holds nothing for a closed engine")


def test_guesses_are_never_stored(tmp_path: Path, manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is published under a hash of verified tokens, and only after they were computed."""
    from kvhold.client.control import Control

    seen: list[tuple[int, list[bytes]]] = []
    commit = Control.commit

    def also(control: Control, space: int, parent: bytes, depth: int, keys: Any, *rest: Any) -> None:
        seen.append((depth, list(keys)))
        commit(control, space, parent, depth, keys, *rest)

    monkeypatch.setattr(Control, "commit", also)
    with weights():
        target = write_config(tmp_path / "target", "llama", num_hidden_layers=2)
        expected = reference(target, PROMPTS, 70)
        options = speculation(tmp_path, "draft_model")
        with serving(target, manager, settings={"save_decode_cache": True}, **options) as llm:
            outputs = generate(llm, PROMPTS, 70)
            settle(llm)
            assert outputs == expected
            texts = [tokens + list(output.tokens) for tokens, output in zip(PROMPTS, outputs, strict=True)]
            assert sum(len(keys) for _, keys in seen) == sum((len(text) - 1) // 32 for text in texts)
            assert llm.reset_prefix_cache()
            longer = [text[: (len(text) - 1) // 32 * 32 + 1] for text in texts]
            again = generate(llm, longer, 1)
            assert [output.cached for output in again] == [len(text) - 1 for text in longer]
        truth = reference(target, longer, 1)
        assert [output.tokens for output in again] == [output.tokens for output in truth]
