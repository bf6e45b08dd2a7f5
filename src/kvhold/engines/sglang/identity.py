"""What must be equal for two SGLang ranks to share an object: everything that gives its bytes their meaning.

SGLang's keys are of tokens, of an adapter's name and path, and of a request's salt. All else is in the namespace.
"""

import enum
import hashlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvhold.copy.processor import cpu_kernels
from kvhold.engines.common.adapters import adapter_digest
from kvhold.engines.common.identity import (
    LAYOUT_VERSION,
    PRIVATE,
    Hashing,
    digest,
    named_weights,
    namespace,
    variant,
    weights_in,
)
from kvhold.engines.common.models import model_folder, plain_config, positions
from kvhold.engines.common.weights import processor_digest, weight_files
from kvhold.engines.sglang.loaded import loaded
from kvhold.engines.sglang.options import CHANGES, HARMLESS, OWN, REFUSED

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.pool_host import HostKVCache

log = logging.getLogger(__name__)

_HASHING = Hashing("sglang sha256", "", 32, False)
_FROM_FOLDER = ("auto", "safetensors", "fastsafetensors", "mistral", "pt", "npcache", "bitsandbytes", "layered")
"""Load formats whose weights are the model folder's. Others may take them from an address or another engine."""
_MOST_FILE = 64 << 20
"""Bytes of a file that an argument names, beyond which its content is not read."""
_GEOMETRY = (
    "layout",
    "page_size",
    "start_layer",
    "end_layer",
    "layer_num",
    "target_layer_num",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "size_per_token",
    "storage_format_tag",
    "stores_page_envelope",
    "dcp_size",
    "num_mamba_layers",
    "conv_state_shapes",
    "conv_dtype",
    "temporal_state_shape",
    "temporal_dtype",
)
"""Attributes of a host pool that say how its pages are made. A pool has those that concern it."""
_PARTITION = "SGLANG_PP_LAYER_PARTITION"
"""Of the environment: how many layers each pipeline stage has, where they are not spread evenly."""
_ALIKE = {"MLATokenToKVPoolHost", "DSAIndexerPoolHost", "DeepSeekV4PagedHostPool", "DeepSeekV4StateHostPool"}
"""Host pools that are the same on all ranks of a model whose keys and values are."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What one rank's KV depends on, its pools excepted.

    ``digest`` has 32 bytes and is equal on ranks that hold the same keys and values. ``private`` says that something
    could not be identified, so that the digest has something random in it. ``label`` names the model and the rank for
    people. ``adapters`` are what the files hold of the LoRA adapters that were loaded at the start, by path.
    """

    digest: bytes
    private: bool
    label: str
    epoch: str
    adapters: dict[str, str]

    def namespace(self, pool: str, described: str, salt: bytes = b"") -> bytes:
        """The 32-byte namespace of the pool ``pool``; ``described`` is of :func:`describe_pool`."""
        kind = hashlib.sha256(f"{pool}\0{described}".encode()).digest()
        return namespace((self.digest, kind), _HASHING, variant(self.epoch, salt, b""))


def identify(config: "HiCacheStorageConfig", epoch: str, weights_id: str | None) -> Identity:
    """The identity of the rank that ``config`` is of, in this scheduler process.

    ``weights_id`` is the operator's word on all weights, if there is one.
    """
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.runtime_context import get_server_args

    server = get_server_args()
    options = effective(server)
    described = describe(config, options, model_config_of(server), weights_id)
    changed = loaded.changed(files_of(options, weights_id))
    if changed:
        log.warning(
            "kvhold: %s is not what it was when SGLang loaded it; this engine shares its KV cache with no other and "
            "starts cold. Start it again",
            changed,
        )
    private = is_private(described) or bool(changed)
    if private:
        described = described | {"alone": os.urandom(16).hex()}
    adapters = {path: found for _, path, found in described["adapters"]}
    return Identity(digest(described), private, label(config), epoch, adapters)


def effective(server: Any) -> dict[str, Any]:
    """The values of all of SGLang's arguments by name, as they were resolved at the start."""
    from sglang.srt.arg_groups.arg_utils import record_fields
    from sglang.srt.arg_groups.overrides import resolution_result

    return {field.name: resolution_result(server, field.name) for field in record_fields(type(server))}


def files_of(options: Mapping[str, Any], weights_id: str | None = None) -> dict[str, list[Path]]:
    """The files that say what an engine of these arguments is, by what they are of; none where the operator says it."""
    folders = {"adapters": [model_folder(path, None) for _, path in map(_named, _listed(options["lora_paths"] or ()))]}
    if weights_id is None:
        where, draft = options["download_dir"], options["speculative_draft_model_path"]
        folders["weights"] = [_weights_folder(options["model_path"], options["revision"], where)]
        if draft is not None:
            folders["draft"] = [_weights_folder(draft, options["speculative_draft_model_revision"], where)]
    values = [value for name, value in options.items() if name in CHANGES and isinstance(value, str)]
    found = {"arguments": [path for path in map(Path, values) if _names_file(path)]}
    for what, some in folders.items():
        found[what] = [path for folder in some if folder is not None for path in weight_files(folder)]
    return found


def _names_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


def label(config: "HiCacheStorageConfig") -> str:
    """The model and the rank, as ``kvhold status`` shows them."""
    sizes = (
        ("tp", config.tp_rank, config.tp_size),
        ("pp", config.pp_rank, config.pp_size),
        ("cp", config.attn_cp_rank, config.attn_cp_size),
    )
    ranks = [f"{kind} {rank}/{size}" for kind, rank, size in sizes if size > 1]
    return " ".join((config.model_name or "unnamed", *ranks))


def describe(
    config: "HiCacheStorageConfig", options: Mapping[str, Any], model: Any, weights_id: str | None
) -> dict[str, Any]:
    """What makes KV incompatible, as plain data. ``model`` is SGLang's ``ModelConfig``, ``options`` are its arguments.

    An argument that nobody has looked at counts.
    """
    from sglang.version import __version__ as sglang_version

    known = HARMLESS | OWN | REFUSED
    folder = model_folder(str(options["model_path"]), options["revision"])
    device = str(options["device"])
    return {
        "kvhold_layout": LAYOUT_VERSION,
        "engine": f"sglang {sglang_version} torch {torch.__version__}",
        "weights": weights_identity(
            options["model_path"], options["revision"], options["load_format"], weights_id, options["download_dir"]
        ),
        "model_config": plain_config(model.hf_config.to_dict()),
        "dtype": str(model.dtype),
        "positions": positions(model.hf_text_config.to_dict(), model.context_len),
        "processor": processor_digest(folder).hex() if folder is not None else "",
        "drafter": _drafter(options, weights_id),
        "adapters": _adapters(options["lora_paths"] or ()),
        "options": {name: plain(value) for name, value in sorted(options.items()) if name not in known},
        # Ranks that hold the same pages have one namespace, whichever of them writes; a pool of others says the rank.
        "rank": [
            -1 if config.is_mla_model else config.tp_rank,
            config.tp_size,
            config.pp_rank,
            config.pp_size,
            config.attn_cp_rank,
            config.attn_cp_size,
            # A pool of states does not say of which layers they are.
            os.environ.get(_PARTITION, "") if config.pp_size > 1 else "",
        ],
        "device": [device, cpu_kernels() if device == "cpu" else _gpu()],
    }


def is_private(identity: Mapping[str, Any]) -> bool:
    """Whether the engine must not share, because something about it cannot be identified."""
    adapters = [found for _, _, found in identity["adapters"]]
    return PRIVATE in (identity["weights"], *identity["drafter"], *adapters, *identity["options"].values())


def weights_identity(
    path: str, revision: str | None, load_format: object, named: str | None, download_dir: str | None = None
) -> str:
    """A string that differs for other weights. Weights that cannot be identified are shared with nobody.

    Those that the operator has ``named`` are not looked at.
    """
    if named is not None:
        return named_weights(named)
    kind = str(getattr(load_format, "value", load_format))
    if kind == "dummy":
        return "dummy"  # SGLang makes them from a fixed seed and the model's configuration
    found = weights_in(_weights_folder(path, revision, download_dir) if kind in _FROM_FOLDER else None)
    if found == PRIVATE:
        log.warning(
            "kvhold: the weights of %s (load format %s) cannot be identified; this engine shares its KV cache with "
            "no other and starts cold. Give a local folder or a downloaded revision, or name the weights with the "
            "setting 'weights_id'",
            path,
            kind,
        )
    return found


def _weights_folder(path: str, revision: str | None, download_dir: str | None) -> Path | None:
    """Where SGLang finds the weights: in the folder it downloads to, or else in the hub library's own."""
    if not Path(path).is_dir() and _from_another_hub():
        return None
    return (model_folder(path, revision, download_dir) if download_dir else None) or model_folder(path, revision)


def _from_another_hub() -> bool:
    """Whether SGLang downloads models from ModelScope, which keeps them elsewhere."""
    return os.environ.get("SGLANG_USE_MODELSCOPE", "").lower() in ("true", "1")


def plain(value: Any) -> Any:
    """An argument's value as data that is equal for what is equal; what it names in files counts by its content.

    PRIVATE, with a warning, for a folder or a large file whose content cannot be told.
    """
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, str):
        return _content(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in sorted(value.items(), key=lambda item: str(item[0]))}
    if isinstance(value, set | frozenset):
        return sorted(str(each) for each in value)
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return repr(value)


def _content(text: str) -> str:
    """``text``, or what stands for the content of the file or the folder that it names."""
    path = Path(text)
    try:
        if not (os.sep in text or path.suffix) or not path.exists():
            return text
        if path.is_file() and path.stat().st_size <= _MOST_FILE:
            return hashlib.sha256(path.read_bytes()).hexdigest()
        found = weights_in(path) if path.is_dir() else PRIVATE
    except OSError:
        found = PRIVATE
    if found == PRIVATE:
        log.warning(
            "kvhold: what %s holds cannot be identified, and an argument of this engine names it; it shares its KV "
            "cache with no other and starts cold",
            text,
        )
    return found


def _drafter(options: Mapping[str, Any], weights_id: str | None) -> list[str]:
    """The model whose guesses are checked: its KV is stored beside the target's."""
    path = options["speculative_draft_model_path"]
    if path is None:
        return []
    revision = options["speculative_draft_model_revision"]
    load_format = options["speculative_draft_load_format"] or options["load_format"]
    folder = model_folder(path, revision)
    config = folder / "config.json" if folder is not None else None
    told = hashlib.sha256(config.read_bytes()).hexdigest() if config is not None and config.is_file() else ""
    return [weights_identity(path, revision, load_format, weights_id, options["download_dir"]), told]


def _adapters(named: Any) -> list[list[str]]:
    """Of each adapter that is loaded at the start: its name and path, which its keys have, and what its files hold."""
    return sorted([name, path, adapter_identity(path)] for name, path in map(_named, _listed(named)))


def _listed(named: Any) -> list[Any]:
    """The adapters of ``--lora-paths``, in whichever form SGLang has them."""
    return [f"{name}={path}" for name, path in named.items()] if isinstance(named, Mapping) else list(named)


def _named(adapter: Any) -> tuple[str, str]:
    """The name and the path of one adapter."""
    if isinstance(adapter, str):
        name, found, path = adapter.partition("=")
        return (name, path) if found else (adapter, adapter)
    if isinstance(adapter, Mapping):
        return str(adapter["lora_name"]), str(adapter["lora_path"])
    return str(adapter.lora_name), str(adapter.lora_path)


def adapter_identity(path: str) -> str:
    """A string that differs for an adapter's other files; PRIVATE, with a warning, where they cannot be read."""
    folder = model_folder(path, None)
    try:
        found = adapter_digest(folder) if folder is not None else None
    except OSError:
        found = None
    if found is None:
        log.warning(
            "kvhold: the files of the LoRA adapter %s cannot be identified; this engine shares its KV cache with no "
            "other and starts cold. Give a local folder with safetensors files",
            path,
        )
    return found.hex() if found is not None else PRIVATE


def _gpu() -> str:
    """The generation of the GPU, by which kernels are chosen."""
    return str(torch.cuda.get_device_capability()) if torch.cuda.is_available() else ""


def held_alike(pool: "HostKVCache", config: "HiCacheStorageConfig") -> bool:
    """Whether tensor-parallel ranks have the same pages in ``pool``.

    A model of latent keys and values may have other pools, whose pages are each rank's own: states, and the keys and
    values of a draft model.
    """
    return config.is_mla_model and not _ALIKE.isdisjoint(kind.__name__ for kind in type(pool).__mro__)


def describe_pool(pool: "HostKVCache", config: "HiCacheStorageConfig") -> str:
    """How the pages of a host pool are made: equal for two pools only if a page of one is a page of the other."""
    device = getattr(pool, "device_pool", None)
    told = {name: repr(getattr(pool, name)) for name in _GEOMETRY if hasattr(pool, name)}
    # Two logical types of eight bits are stored in the same type.
    types = [str(getattr(holder, name, "")) for holder in (pool, device) for name in ("dtype", "store_dtype")]
    packed = sorted(type(each).__name__ for each in getattr(pool, "packed_draft_device_pools", None) or ())
    rank = -1 if held_alike(pool, config) else config.tp_rank
    return repr([type(pool).__name__, type(device).__name__, sorted(told.items()), types, packed, rank])
