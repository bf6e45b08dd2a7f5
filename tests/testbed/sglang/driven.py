"""An SGLang engine that does what lines say: ``python -m testbed.sglang.driven REPLIES OPTIONS``.

Each line of its standard input is JSON, ``{"do": NAME, ...}``; for each one goes to descriptor ``REPLIES``.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def generate(
    engine: Any,
    prompts: list[list[int]],
    new: int = 8,
    salt: str | None = None,
    logprobs: bool = False,
    adapter: str | None = None,
) -> list[dict[str, Any]]:
    """All ``prompts`` at once: of each the tokens, their log probabilities, and what came from where."""

    async def all_of_them() -> list[Any]:
        import asyncio

        sampling = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True}
        extra = {"cache_salt": salt, "lora_path": adapter}
        given = {name: value for name, value in extra.items() if value is not None}
        each = (
            engine.async_generate(input_ids=prompt, sampling_params=sampling, return_logprob=logprobs, **given)
            for prompt in prompts
        )
        return list(await asyncio.gather(*each))

    answers = engine.loop.run_until_complete(all_of_them())
    return [
        {
            "tokens": answer["output_ids"],
            "cached": answer["meta_info"]["cached_tokens"],
            "stored": (answer["meta_info"].get("cached_tokens_details") or {}).get("storage", 0),
            "logprobs": [one[0] for one in answer["meta_info"].get("output_token_logprobs") or []],
            "reason": answer["meta_info"]["finish_reason"],
        }
        for answer in answers
    ]


def flush(engine: Any) -> bool:
    """False while pages are still written to the storage: SGLang wants to be asked again."""
    return bool(engine.flush_cache().success)


def update(engine: Any, model: str, flush_cache: bool = True) -> bool:
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    asked = UpdateWeightFromDiskReqInput(model_path=model, flush_cache=flush_cache)
    return bool(engine.loop.run_until_complete(engine.tokenizer_manager.update_weights_from_disk(asked, None))[0])


def exchange(engine: Any, name: str, path: str) -> bool:
    """The adapter ``name`` is loaded again, from what its files are now."""
    return bool(engine.unload_lora_adapter(name).success and engine.load_lora_adapter(name, path).success)


def clear(engine: Any) -> bool:
    return bool(engine.loop.run_until_complete(engine.tokenizer_manager.clear_hicache_storage()).success)


def distribute(engine: Any, model: str) -> bool:
    """The weights of ``model``, as a trainer sends them: in an update of two calls, through a process group."""
    import threading

    import torch
    from sglang.srt.utils import init_custom_process_group
    from sglang.srt.utils.network import get_open_port

    port, made = get_open_port(), []

    def train() -> None:
        where = f"tcp://127.0.0.1:{port}"
        made.append(init_custom_process_group("gloo", where, world_size=2, rank=0, group_name="trained"))

    trainer = threading.Thread(target=train)
    trainer.start()
    done = [engine.init_weights_update_group("127.0.0.1", port, 1, 2, "trained", "gloo")[0]]
    trainer.join()
    weights = list(_weights(model).items())
    done.append(engine.begin_weight_update()[0])
    for part in (weights[::2], weights[1::2]):
        sender = threading.Thread(
            target=lambda part=part: [torch.distributed.broadcast(each, 0, group=made[0]) for _, each in part]
        )
        sender.start()
        about = [
            [name for name, _ in part],
            [str(each.dtype)[6:] for _, each in part],
            [each.shape for _, each in part],
        ]
        done.append(engine.update_weights_from_distributed(*about, "trained", flush_cache=False)[0])
        sender.join()
    done.append(engine.end_weight_update()[0])
    return all(done)


def hand_over(engine: Any, model: str) -> bool:
    """The weights of ``model``, as tensors of this process; the engine is flushed before the update ends."""
    done = [engine.begin_weight_update()[0]]
    done.append(engine.update_weights_from_tensor(list(_weights(model).items()))[0])
    done.append(engine.end_weight_update()[0])
    return all(done)


def _weights(model: str) -> dict[str, Any]:
    from pathlib import Path

    from safetensors.torch import load_file

    [file] = Path(model).glob("*.safetensors")
    return dict(load_file(file))


def attach(engine: Any, extra: str, policy: str | None = None) -> bool:
    answer = engine.loop.run_until_complete(
        engine.tokenizer_manager.attach_hicache_storage(
            "dynamic", hicache_storage_backend_extra_config_json=extra, hicache_storage_prefetch_policy=policy
        )
    )
    return bool(answer.success)


def detach(engine: Any) -> bool:
    return bool(engine.loop.run_until_complete(engine.tokenizer_manager.detach_hicache_storage()).success)


DOES: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (generate, flush, update, distribute, hand_over, exchange, clear, attach, detach)
}


def main() -> None:
    import sglang

    replies = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    os.set_inheritable(replies.fileno(), False)
    engine = sglang.Engine(**json.loads(sys.argv[2]))
    try:
        replies.write(json.dumps({"ready": True}) + "\n")
        for line in sys.stdin:
            asked = json.loads(line)
            replies.write(json.dumps(DOES[asked.pop("do")](engine, **asked)) + "\n")
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
