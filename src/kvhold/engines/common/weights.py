"""What a model's weights are, without reading all of them.

A file in the Hugging Face cache is named by the digest of its content. Of any other file count the name, the size, the
time of its last change and some bytes: of every tensor of a safetensors file, at regular distances elsewhere. A copy
is the same model only if it kept its times (``cp -a``, ``rsync -a``); a checkpoint edited in place is another.
"""

import hashlib
import json
import os
import re
import struct
from pathlib import Path

_SAMPLE = 256
"""Bytes read of each tensor, or at each place of a file without a known structure."""
_PLACES = 4096
_SHA256 = re.compile("[0-9a-f]{64}")
_CODE = ".py"
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npcache", _CODE)
_PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def weight_files(folder: Path) -> list[Path]:
    """What in ``folder`` has weights, and the code that makes something of them."""
    return sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES and path.is_file())


def weights_digest(folder: Path) -> bytes | None:
    """A digest of the weight files in ``folder``, independent of where that lies; None if there are none to read."""
    files = weight_files(folder)
    if all(path.suffix == _CODE for path in files):
        return None
    digest = hashlib.sha256()
    for path in files:
        content = path.resolve().name
        if path.is_symlink() and _SHA256.fullmatch(content):
            digest.update(f"{path.name}\0{content}\0".encode())
            continue
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0{path.stat().st_mtime_ns}\0".encode())
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            places = _tensors(descriptor, size, digest) if path.suffix == ".safetensors" else None
            for place in places or _regular(size):
                digest.update(os.pread(descriptor, _SAMPLE, place))
        finally:
            os.close(descriptor)
    return digest.digest()


def processor_digest(folder: Path) -> bytes:
    """A digest of how a model's folder has images, videos and sounds prepared."""
    digest = hashlib.sha256()
    for name in _PROCESSORS:
        path = folder / name
        digest.update(f"{name}\0".encode() + (hashlib.sha256(path.read_bytes()).digest() if path.is_file() else b""))
    return digest.digest()


def _tensors(descriptor: int, size: int, digest: "hashlib._Hash") -> list[int] | None:
    """Adds the header to ``digest``; a place inside of each tensor, by the format's header."""
    (length,) = struct.unpack("<Q", os.pread(descriptor, 8, 0))
    if length > size:
        return None
    header = os.pread(descriptor, length, 8)
    digest.update(header)
    places = []
    for name, entry in json.loads(header).items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            places += [8 + length + start, 8 + length + max(start, start + (end - start) // 2 - _SAMPLE // 2)]
    return places


def _regular(size: int) -> range:
    return range(0, size, max(_SAMPLE, size // _PLACES))
