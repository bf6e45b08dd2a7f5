"""Objects in a bucket, or files in a folder that hosts share: obstore does both."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeVar

import obstore
from obstore.store import LocalStore, S3Store

from kvhold.tiers.remote.stores import ABSENT, Slot
from kvhold.tiers.remote.url import RemoteConfig
from kvhold.units import format_size

T = TypeVar("T")
_AT_ONCE: Final = 16


class Objects:
    """``folder`` is where a shared folder is, whose filesystem keeps ``min_free`` bytes free; "" for a bucket."""

    def __init__(self, store: Any, prefix: str, folder: str, min_free: int) -> None:
        self._store = store
        self._prefix = f"{prefix}/" if prefix else ""
        self._folder = folder
        self._min_free = min_free
        self._pool = ThreadPoolExecutor(_AT_ONCE, "kvhold-remote-object")

    def exists(self, names: Sequence[str]) -> list[bool]:
        return self._each(self._is_there, names)

    def get(self, names: Sequence[str], slots: Sequence[Slot]) -> list[int]:
        return self._each(lambda pair: self._get(*pair), list(zip(names, slots, strict=True)))

    def put(self, names: Sequence[str], slots: Sequence[Slot]) -> list[bool]:
        if self._folder:
            self._has_room(sum(slot.length for slot in slots))
        return self._each(lambda pair: self._put(*pair), list(zip(names, slots, strict=True)))

    def remove(self, names: Sequence[str], prefix: str) -> None:
        self._each(self._remove, [self._prefix + name for name in names])
        if prefix:
            # obstore takes a prefix as whole parts of a path, so it ends without a slash.
            for batch in obstore.list(self._store, prefix=(self._prefix + prefix).rstrip("/")):
                self._each(self._remove, [each["path"] for each in batch])

    def _each(self, do: Callable[[Any], T], of: Sequence[Any]) -> list[T]:
        return list(self._pool.map(do, of)) if len(of) > 1 else [do(each) for each in of]

    def _is_there(self, name: str) -> bool:
        try:
            obstore.head(self._store, self._prefix + name)
        except FileNotFoundError:
            return False
        return True

    def _get(self, name: str, slot: Slot) -> int:
        try:
            got = obstore.get(self._store, self._prefix + name)
            size = int(got.meta["size"])
            if size != slot.length:
                return size
            return slot.fill(memoryview(got.bytes()))
        except FileNotFoundError:
            return ABSENT

    def _put(self, name: str, slot: Slot) -> bool:
        obstore.put(self._store, self._prefix + name, [slot.header, slot.payload], use_multipart=False)
        return True

    def _remove(self, path: str) -> None:
        try:
            obstore.delete(self._store, path)
        except FileNotFoundError:
            pass

    def _has_room(self, size: int) -> None:
        about = os.statvfs(self._folder)
        free = about.f_bavail * about.f_frsize
        if free - size < self._min_free:
            raise OSError(
                f"{self._folder} has {format_size(free)} free, and {format_size(self._min_free)} are kept free; "
                "delete files there that were not read for long, or lower ?min_free="
            )


def connect(config: RemoteConfig) -> Objects:
    if config.scheme == "file":
        if not Path(config.path).is_dir():
            raise OSError(f"{config.path} is not a folder; make it, or mount what is shared there")
        return Objects(LocalStore(config.path), "", config.path, config.min_free)
    options: dict[str, Any] = {}
    if key := config.secret("AWS_ACCESS_KEY_ID"):
        options["access_key_id"] = key
        options["secret_access_key"] = config.secret("AWS_SECRET_ACCESS_KEY")
    if token := config.secret("AWS_SESSION_TOKEN"):
        options["session_token"] = token
    if config.endpoint:
        options["endpoint"] = config.endpoint
    if config.region:
        options["region"] = config.region
    client: Any = {
        "timeout": timedelta(seconds=5),
        "connect_timeout": timedelta(seconds=2),
        "allow_http": config.endpoint.startswith("http://"),
    }
    # A call that is tried again is one that takes too long: its deadline is the executor's.
    options["retry_config"] = {"max_retries": 0, "retry_timeout": timedelta(seconds=5)}
    store = S3Store(config.host, client_options=client, **options)
    return Objects(store, config.path, "", 0)
