"""One of several data-parallel ranks that run in step, as those of a mixture of experts do, in a process of its own.

vLLM's front-end has a process for each rank's loop, one for its worker and one that coordinates them, and each imports
vLLM. Here a rank's scheduler and worker share the process of its loop, which is vLLM's own, and whoever started the
ranks is front-end and coordinator at once: :class:`RanksInStep`.

Run as a program it takes its options as JSON, and JSON lines after that.
"""

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ANSWER_SECONDS = 600.0
"""Until ranks that say nothing are taken to hang: on a busy machine they import vLLM for minutes."""


class RanksInStep:
    """As many processes as ``ranks`` says, of engines of one rank each that step together."""

    def __init__(self, model: Path, connector: dict[str, Any], ranks: int = 2, **options: Any) -> None:
        from vllm.distributed.utils import create_tcp_store

        # Here they agree on ports that are free; this process has no other part in it.
        self._store = create_tcp_store("127.0.0.1", 0, is_master=True, world_size=-1, wait_for_workers=False)
        told = {"model": str(model), "connector": connector, "ranks": ranks, "store": self._store.port, **options}
        self._processes = [
            subprocess.Popen(
                [sys.executable, __file__, json.dumps({**told, "rank": rank})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            for rank in range(ranks)
        ]
        self._buffers = [b""] * ranks
        self._wave, self._running = 0, False
        self._asked = 0
        self._answers: dict[Any, dict[str, Any]] = {}

    def await_start(self) -> None:
        self.answers([f"start {rank}" for rank in range(len(self._processes))])

    def ask(self, requests: Sequence[tuple[int, list[int]]], adapter: Path | None = None) -> list[dict[str, Any]]:
        """Outputs of requests, each by the rank that is named; all of them at once."""
        return self.answers(self.begin(requests, adapter))

    def begin(self, requests: Sequence[tuple[int, list[int]]], adapter: Path | None = None) -> list[str]:
        """Names of requests that run from now on."""
        names = []
        for rank, tokens in requests:
            self._asked += 1
            names.append(f"request {self._asked}")
            self._say(rank, add=names[-1], tokens=tokens, adapter=adapter and str(adapter), wave=self._wave)
            if not self._running:
                self._start_wave(but=rank)
        return names

    def call(self, method: str, *arguments: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        """What the engines of ``ranks``, or else all, answer to a call of vLLM's front-end."""
        names = []
        for rank in range(len(self._processes)) if ranks is None else ranks:
            self._asked += 1
            names.append(f"call {self._asked}")
            self._say(rank, call=self._asked, method=method, arguments=arguments)
        return [answer["value"] for answer in self.answers(names)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    def _start_wave(self, but: int) -> None:
        self._running = True
        for rank in range(len(self._processes)):
            self._say(rank, wave=self._wave, but=but)

    def _say(self, rank: int, **message: Any) -> None:
        stdin = self._processes[rank].stdin
        assert stdin is not None
        stdin.write(json.dumps(message).encode() + b"\n")
        stdin.flush()

    def answers(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Waits for them."""
        end = time.monotonic() + ANSWER_SECONDS
        while not all(name in self._answers for name in names):
            pipes = [process.stdout for process in self._processes]
            readable, _, _ = select.select(pipes, [], [], max(0.0, end - time.monotonic()))
            assert readable, f"no answer to {names}"
            for pipe in readable:
                rank = pipes.index(pipe)
                data = os.read(pipe.fileno(), 1 << 20)
                assert data, f"rank {rank} ended"
                *lines, self._buffers[rank] = (self._buffers[rank] + data).split(b"\n")
                for line in lines:
                    self._hear(rank, json.loads(line))
        return [self._answers.pop(name) for name in names]

    def _hear(self, rank: int, message: dict[str, Any]) -> None:
        """An answer, or what a coordinator is told: see vLLM's ``DPCoordinatorProc``."""
        if "ended" in message:
            if self._wave <= message["ended"]:
                self._wave, self._running = message["ended"] + 1, False
        elif "begun" in message:
            if message["begun"] > self._wave or (message["begun"] == self._wave and not self._running):
                self._wave = message["begun"]
                self._start_wave(but=rank)
        else:
            self._answers[message["to"]] = message


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the engine's own prints go to stderr

    def say(**message: Any) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    from testbed.engine import bed
    from testbed.engine.engine_process import packed
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest, EngineCoreRequestType, core
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.engine.utils import EngineZmqAddresses
    from vllm.v1.executor import Executor

    options = json.loads(sys.argv[1])
    rank, store, connector = options.pop("rank"), options.pop("store"), options.pop("connector")
    outputs = OutputProcessor(None, log_stats=False)

    def take(request: EngineCoreRequest) -> EngineCoreRequest:
        request.external_req_id = request.request_id
        outputs.add_request(request, None)
        return request

    class Rank(core.DPEngineCoreProc):
        """Its lines of input and output are those of this process."""

        @contextmanager
        def _perform_handshakes(self, *arguments: Any) -> Any:
            yield EngineZmqAddresses([], [], coordinator_input="this process", coordinator_output="this process")

        def process_input_sockets(self, inputs: Any, coordinator: Any, identity: Any, ready: threading.Event) -> None:
            ready.set()
            for line in sys.stdin:
                message = json.loads(line)
                if "add" in message:
                    adapter = message["adapter"] and LoRARequest("tuned", 1, message["adapter"])
                    asked = take(
                        EngineCoreRequest(
                            request_id=message["add"],
                            prompt_token_ids=message["tokens"],
                            mm_features=None,
                            sampling_params=bed._greedy(8),
                            pooling_params=None,
                            arrival_time=time.time(),
                            lora_request=adapter,
                            cache_salt=None,
                            data_parallel_rank=None,
                            current_wave=message["wave"],
                        )
                    )
                    self.input_queue.put((EngineCoreRequestType.ADD, self.preprocess_add_request(asked)))
                elif "call" in message:
                    call = 0, message["call"], message["method"], message["arguments"]
                    self.input_queue.put((EngineCoreRequestType.UTILITY, call))
                else:
                    wave = message["wave"], message["but"]
                    self.input_queue.put((EngineCoreRequestType.START_DP_WAVE, wave))

        def process_output_sockets(self, *arguments: Any) -> None:
            say(to=f"start {rank}")
            while True:
                told = self.output_queue.get()
                if not isinstance(told, tuple):
                    return  # the engine has failed
                self._tell(told[1])

        def _tell(self, told: EngineCoreOutputs) -> None:
            for request in outputs.process_outputs(told.outputs).request_outputs:
                if request.finished:
                    say(to=request.request_id, **packed(bed.Output.of(request)))
            if (answer := told.utility_output) is not None:
                assert answer.failure_message is None, answer.failure_message
                value = answer.result.result if answer.result is not None else None
                say(to=f"call {answer.call_id}", value=value)
            if told.wave_complete is not None:
                say(ended=told.wave_complete)
            if told.start_wave is not None:
                say(begun=told.start_wave)

    core.DPEngineCoreProc = Rank  # type: ignore[misc]
    transfer = KVTransferConfig(
        kv_connector="KvHoldConnector",
        kv_connector_module_path="kvhold.engines.vllm.connector",
        kv_connector_extra_config=connector,
        kv_role="kv_both",
        engine_id="in_step",
    )
    config = EngineArgs(
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=16,
        block_size=32,
        kv_cache_memory_bytes=64 << 20,
        seed=0,
        data_parallel_size=options.pop("ranks"),
        kv_transfer_config=transfer,
        worker_extension_cls="testbed.engine.retrained.Retrained",
        **options,
    ).create_engine_config()
    config.parallel_config._coord_store_port = store
    with bed._fast():
        core.EngineCoreProc.run_engine_core(
            dp_rank=rank,
            local_dp_rank=rank,
            vllm_config=config,
            local_client=True,
            handshake_address="",
            executor_class=Executor.get_class(config),
            log_stats=False,
        )


if __name__ == "__main__":
    main()
