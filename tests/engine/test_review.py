"""What reviewers broke once: each of these gave a wrong token, a leak or a lost session before it was mended."""

import os
import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from testbed.engine.bed import drain, free_blocks, generate, prompt, reference, step
from testbed.engine.kvhold_bed import check_nothing_held, scheduler_side, serving, status, until, worker_side
from testbed.engine.models import write_llama
from testbed.process.manager_process import Manager

from kvhold.engines.common.accounts import Accounts
from kvhold.engines.common.batches import Batch, Batches
from kvhold.engines.common.plans import CopyReport
from kvhold.engines.vllm.publishing import HeldBlocks

PROMPTS = [prompt(400, seed) for seed in range(3)]


def test_sources_are_held_until_the_last_rank_has_copied() -> None:
    told: list[str] = []
    freed: list[int] = []
    control: Any = SimpleNamespace(
        attachment=1, credit={1: ()}, commit=lambda *_: told.append("commit"), give_back=lambda *_: told.append("back")
    )
    pool: Any = SimpleNamespace(
        num_gpu_blocks=100, blocks=list(range(100)), free_blocks=lambda blocks: freed.extend(blocks)
    )
    batches = Batches(control, Accounts(), SimpleNamespace(sure=lambda *_: True))  # type: ignore[arg-type]
    batches.source = HeldBlocks(pool)
    slots: Any = SimpleNamespace()
    batches._batches = {n: Batch(1, 0, 1, b"", [b"k"], slots, [7], 0, 0.0) for n in (1, 2)}
    both = [{0: 4096, 1: 4096}]
    batches.ended(CopyReport({1: {0: 4096}, 2: {1: 4096}}), both)
    assert (freed, told) == ([], [])
    batches.ended(CopyReport({1: {1: 4096}}), both)
    assert (freed, told) == ([7], ["commit"])
    batches.ended(CopyReport({2: {0: -1}}), both)
    assert (freed, told) == ([7, 7], ["commit", "back"])
    assert not batches.holding


def test_context_length_that_changes_position_encodings_is_part_of_the_identity(
    tmp_path: Path, manager: Manager
) -> None:
    """Dynamic and long rope derive their factors from the engine's context length, not from the checkpoint alone."""
    rope = {"rope_type": "dynamic", "factor": 2.0}
    folder = write_llama(tmp_path / "dynamic", rope_scaling=rope, rope_parameters={**rope, "rope_theta": 10000.0})
    with serving(folder, manager, max_model_len=1024) as llm:
        generate(llm, PROMPTS[:1])
    with serving(folder, manager, max_model_len=512) as llm:
        assert generate(llm, PROMPTS[:1])[0].cached == 0


def test_sessions_lost_again_and_again_on_a_living_manager_leave_nothing_behind(
    llama_dir: Path, manager: Manager
) -> None:
    with serving(llama_dir, manager) as llm:
        free = free_blocks(llm)
        for turn in range(12):
            generate(llm, [prompt(200, 50 + turn)])
            # both halves lose their sessions, again before the words that retire the last ones were all said
            for channel in (worker_side().copies.attacher.channel, scheduler_side(llm).session._attacher.channel):
                if channel is not None:
                    channel.socket.shutdown(socket.SHUT_RDWR)
        until(lambda: _attached_once(llm, manager), "one attachment, and no other")
        assert status(manager.socket)["accounts"]["orphaned"] == 0
        check_nothing_held(llm, free, manager.socket)


def _attached_once(llm: Any, manager: Manager) -> bool:
    step(llm)
    return [i["ready"] for i in status(manager.socket)["instances"]] == [True]


def test_a_forked_child_that_ends_does_not_end_its_parents_session(llama_dir: Path, manager: Manager) -> None:
    expected = reference(llama_dir, PROMPTS)
    with serving(llama_dir, manager) as llm:
        generate(llm, PROMPTS)
        assert llm.reset_prefix_cache()
        before = [session["since"] for session in status(manager.socket)["sessions"]]
        child = os.fork()
        if child == 0:
            try:
                scheduler_connector = scheduler_side(llm)
                scheduler_connector.control.bye()
                worker_side().copies.attacher.channel.bye()  # type: ignore[union-attr]
                from testbed.engine.bed import scheduler_half, worker_half

                scheduler_half(llm).shutdown()
                worker_half().shutdown()
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        assert [session["since"] for session in status(manager.socket)["sessions"]] == before
        outputs = generate(llm, PROMPTS)
        assert outputs == expected
        assert [output.cached for output in outputs] == [384, 384, 384]


def test_an_attacher_survives_whatever_its_half_does(
    llama_dir: Path, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvhold.copy.host import HostCopier

    with serving(llama_dir, manager) as llm:
        failures = iter([RuntimeError("pinning failed"), KeyError("x")])

        def failing(self: HostCopier, arena: Any) -> None:
            if error := next(failures, None):
                raise error

        monkeypatch.setattr(HostCopier, "register", failing)
        manager.restart()
        until(lambda: _attached_once(llm, manager), "attached at the third attempt")
        drain(llm)


def test_more_blocks_than_a_question_may_name(llama_dir: Path, manager: Manager) -> None:
    with serving(llama_dir, manager) as llm:
        half = scheduler_side(llm)
        request: Any = SimpleNamespace(
            request_id="long",
            num_tokens=32 * 70_000,
            block_hashes=[b"%032d" % i for i in range(70_000)],
            skip_reading_prefix_cache=False,
            lora_request=None,
            prompt_embeds=None,
            prompt_is_token_ids=None,
            pooling_params=None,
            shared_prefix_boundary=0,
        )
        answer = None
        while answer is None:
            answer, _ = half.restores.matched_tokens(request, 0)
            half.session.end_step()
        assert answer == 0
        half.finished(request)
        assert status(manager.socket)["instances"][0]["ready"]


def test_the_wait_is_exact() -> None:
    """A wait is rounded neither to the kernel's tick nor to milliseconds: the step's budget is made of such waits."""
    import select

    from kvhold.client import wait

    seen: list[tuple[int, int]] = []
    real = wait._ppoll

    def spy(descriptors: Any, count: int, timeout: Any, mask: Any) -> int:
        seen.append((timeout._obj.seconds, timeout._obj.nanoseconds))
        return int(real(descriptors, count, timeout, mask))

    left, right = socket.socketpair()
    with left, right, pytest.MonkeyPatch.context() as patch:
        patch.setattr(wait, "_ppoll", spy)
        wait.wait_for(left.fileno(), select.POLLIN, 0.00025)
        wait.wait_for(left.fileno(), select.POLLIN, 1.5e-6)
        right.send(b"x")
        wait.wait_for(left.fileno(), select.POLLIN, 1000.25)
    assert seen == [(0, 250_000), (0, 1_500), (1000, 250_000_000)]
