"""Workers that disagree about their KV cache after the engine's start."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from testbed.engine.bed import generate, prompt, scheduler_half
from testbed.engine.kvhold_bed import attached, counting, serving, until, warm_up, worker_side
from testbed.process.manager_process import Manager

from kvhold.engines.common import spaces


def test_while_the_workers_disagree_nothing_is_found_or_stored_and_the_log_says_why(
    llama_dir: Path, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that begins after the engine's start cannot stop it: it serves nothing until all agree."""
    said: list[str] = []
    monkeypatch.setattr(spaces.log, "error", lambda text, *args: said.append(text % args))
    with serving(llama_dir, manager) as llm, counting() as counts:
        copies = worker_side().copies
        assert copies is not None
        other, agreed = replace(copies._report, owner=1), copies.mappings._hello
        copies.mappings._hello = msgspec.structs.replace(agreed, report=other.packed())
        manager.restart()
        until(lambda: attached(llm), "it attaches again")
        generate(llm, [prompt(100, 1)] * 2)
        assert llm.reset_prefix_cache()
        generate(llm, [prompt(100, 1)])
        assert (counts["blocks_published"], counts["tokens_hit"], counts["load_failures"]) == (0, 0, 0)
        assert len(said) == 1
        assert "disagree about their KV cache: rank 0: " in said[0]
        with pytest.raises(ValueError, match="disagree about their KV cache: rank 0: "):
            scheduler_half(llm).set_xfer_handshake_metadata_pp_aware({})  # as at the start, which it stops
        copies.mappings._hello = agreed
        manager.restart()
        until(lambda: attached(llm), "it attaches again")
        warm_up(llm)
        generate(llm, [prompt(100, 2)])
        assert counts["blocks_published"] == 3
