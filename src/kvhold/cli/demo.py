"""``kvhold demo``: the main job on real input, and a check that it changes nothing.

One prompt is answered five times: computed, from the engine's own cache, from kvhold after that cache was emptied, from
kvhold in another engine process, and from SSD after everything was killed. The manager is the one that the first engine
starts by itself. Such a manager ends with its last engine, so the second engine attaches before the first one ends.
"""

import importlib.util
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from kvhold.cli.demo_engine import (
    BLOCK,
    CONTEXT,
    Answer,
    DemoError,
    EngineProcess,
    await_populated,
    await_written,
    end_manager,
    find_socket,
    kill_manager,
    manager_report,
    whole_blocks,
)
from kvhold.cli.demo_model import ensure_model
from kvhold.cli.demo_text import QUESTION, QUESTION_FOR_ANY_TEXT, TEXT, make_prompt
from kvhold.cli.demo_view import Progress, print_summary, why_no_hit

ANSWER_TOKENS = 32
_SSD = "600MiB"
"""Room for the longest prompt's KV, in whatever type of numbers."""
_POPULATE_SECONDS = 30.0
_END_SECONDS = 60.0

OWN, KVHOLD = "local_cache_hit", "external_kv_transfer"
"""vLLM's names for where a prompt's tokens came from."""


@dataclass(frozen=True)
class Run:
    """One of the five."""

    name: str
    answer: Answer


class Interrupted(BaseException):
    """A signal that ends the demo; ``args[0]`` is its number."""


def demo(
    prompt_file: Annotated[
        Path | None, typer.Option(help="Your own text instead of the built-in one.", exists=True, dir_okay=False)
    ] = None,
    question: Annotated[str | None, typer.Option(help="What to ask about the text.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the engines' logs while they run.")] = False,
) -> None:
    """Answer a question about a text computed, and restored by kvhold, also after a crash, and compare."""
    progress = Progress(animate=not verbose)
    try:
        with _signals_raise(), progress:
            _demo(prompt_file, question, verbose, progress)
    except DemoError as error:
        typer.echo(f"kvhold demo: {error}", err=True)
        raise typer.Exit(1) from None
    except Interrupted as interrupted:
        typer.echo("kvhold demo: interrupted, all engines and the manager ended", err=True)
        raise typer.Exit(128 + interrupted.args[0]) from None


def _demo(prompt_file: Path | None, question: str | None, verbose: bool, progress: Progress) -> None:
    text = _read(prompt_file) if prompt_file else TEXT
    question = question or (QUESTION_FOR_ANY_TEXT if prompt_file else QUESTION)
    if importlib.util.find_spec("vllm") is None:
        raise DemoError("no engine is installed; run: ./dev demo")
    try:
        model = ensure_model(progress.say)
    except RuntimeError as error:
        raise DemoError(str(error)) from None
    tokens = _tokenize(model, make_prompt(text, question))
    with tempfile.TemporaryDirectory(prefix="kvhold-demo-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        try:
            runs, about = _run_all(model, tokens, folder, verbose, progress)
        finally:
            progress.say("waiting for the manager to end")
            ended = end_manager(folder, _END_SECONDS)
    if not ended:
        raise DemoError(f"the manager did not end within {_END_SECONDS:g} s after its last engine, and was killed")
    progress.stop()
    print_summary(question, [(run.name, run.answer) for run in runs], about)
    _compare(runs)


def _run_all(
    model: Path, tokens: list[int], folder: Path, verbose: bool, progress: Progress
) -> tuple[list[Run], dict[str, object]]:
    runs: list[Run] = []

    # ``source`` is where the prompt's whole blocks must come from; None: they are computed.
    def run(name: str, engine: EngineProcess, source: str | None) -> None:
        progress.say(f"{len(runs) + 1} of 5, {name}: a prompt of {len(tokens)} tokens")
        answer = engine.run(tokens, ANSWER_TOKENS)
        runs.append(Run(name, answer))
        wanted = whole_blocks(len(tokens))
        got = answer.metric(source) if source else wanted
        if got < wanted:
            raise DemoError(
                f"no hit in run {len(runs)}, {name}: {got} of {wanted} tokens came from "
                + ("kvhold.\n" if source == KVHOLD else "the engine's own cache.\n")
                + "\n".join(why_no_hit(runs[0].answer, answer, manager_report(folder), engine.log_tail()))
            )

    progress.say("starting engine A, which starts a manager of its own")
    ssd = {"ssd": f"{folder / 'ssd'}:{_SSD}"}
    with EngineProcess("A", model, len(tokens), folder, verbose, ssd) as first:
        first.await_start()
        await_populated(folder, _POPULATE_SECONDS)
        run("computed", first, None)
        run("engine's own cache", first, OWN)
        first.reset_prefix_cache()
        run("kvhold, after reset", first, KVHOLD)
        progress.say("starting engine B in a fresh process, on the same manager")
        with EngineProcess("B", model, len(tokens), folder, verbose, {"socket": str(find_socket(folder))}) as second:
            second.await_start()
            first.end()
            run("kvhold, new engine", second, KVHOLD)
            await_written(folder, _POPULATE_SECONDS)
            progress.say("killing engine B and the manager, and starting engine C")
            kill_manager(folder)
    with EngineProcess("C", model, len(tokens), folder, verbose, ssd) as third:
        third.await_start()
        await_populated(folder, _POPULATE_SECONDS)
        run("SSD, all restarted", third, KVHOLD)
        third.end()
    return runs, first.about


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DemoError(f"{path} cannot be read as text: {error}") from None


def _tokenize(model: Path, prompt: str) -> list[int]:
    """The prompt's tokens. Raises DemoError if there are too few to cache or too many for the model."""
    from tokenizers import Tokenizer

    tokens: list[int] = Tokenizer.from_file(str(model / "tokenizer.json")).encode(prompt).ids
    if whole_blocks(len(tokens)) == 0:
        raise DemoError(
            f"the prompt is too short: text, question and chat format make {len(tokens)} tokens. A cache keeps whole "
            f"blocks of {BLOCK} tokens and leaves the last token to compute, so it takes {BLOCK + 1} to restore any"
        )
    if len(tokens) > CONTEXT - ANSWER_TOKENS:
        raise DemoError(
            f"the prompt is too long: text, question and chat format make {len(tokens)} tokens, and the model takes "
            f"{CONTEXT - ANSWER_TOKENS}"
        )
    return tokens


def _compare(runs: list[Run]) -> None:
    """Say that the answers are identical; raises DemoError if they are not."""

    def same(a: Run, b: Run) -> bool:
        return (a.answer.tokens, a.answer.logprobs) == (b.answer.tokens, b.answer.logprobs)

    computed, own, *_ = runs
    different = [run.name for run in runs if not same(run, computed)]
    if not different:
        count = len(computed.answer.tokens)
        typer.echo(f"Identical in all five runs: the answer's {count} tokens and their logprobs, bit for bit.")
        return
    reason = f"the answers differ from the computed one in: {', '.join(different)}"
    if not same(own, computed) and all(same(run, own) for run in runs[2:]):
        reason += ". kvhold's are identical with the engine's own cache's: the engine itself gives other numbers"
    raise DemoError(reason)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Have the first signal raise Interrupted, and later ones not disturb the cleaning up."""
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]

    def interrupt(number: int, frame: FrameType | None) -> None:
        for other in numbers:
            signal.signal(other, signal.SIG_IGN)
        raise Interrupted(number)

    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
