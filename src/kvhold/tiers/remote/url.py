"""Which store, as people write it: a URL without secrets."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

from kvhold.units import parse_address, parse_size

_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PARAMETERS: Final = {
    "mooncake": {"pool", "protocol", "local"},
    "redis": {"pool", "secret_file"},
    "rediss": {"pool", "secret_file"},
    "unix": {"pool", "secret_file"},
    "s3": {"pool", "secret_file", "endpoint", "region"},
    "file": {"pool", "min_free"},
}
_EXAMPLES: Final = "mooncake://HOST:PORT, redis://HOST:PORT, s3://BUCKET/PREFIX?endpoint=URL or file:///FOLDER"
MIN_FREE: Final = 1 << 30
"""Bytes that a shared folder's filesystem keeps free, unless a URL says otherwise."""


@dataclass(frozen=True, slots=True)
class RemoteConfig:
    """``url`` is as it was given. It has no secret: those come from the environment or from ``secret_file``."""

    url: str
    scheme: str
    pool: str
    host: str = ""
    port: int = 0
    path: str = ""  # a folder, a socket, a prefix in a bucket or the number of a database
    endpoint: str = ""
    region: str = ""
    local: str = ""  # the address under which a store's other clients reach this host
    min_free: int = MIN_FREE
    secret_file: str = field(default="", repr=False)

    def __str__(self) -> str:
        return self.url

    @property
    def shown(self) -> str:
        """What status and logs call it."""
        return self.url

    @property
    def extra(self) -> str:
        """The extra of kvhold that brings this store's library."""
        return {"s3": "objects", "file": "objects", "mooncake": "mooncake"}.get(self.scheme, "redis")

    def secret(self, name: str) -> str:
        """``KVHOLD_REMOTE_USER`` or another of the environment, or the line ``NAME=VALUE`` of the file. May be empty.

        OSError: the file cannot be read.
        """
        if self.secret_file:
            for line in Path(self.secret_file).read_text().splitlines():
                said, equals, value = line.partition("=")
                if equals and said.strip() == name:
                    return value.strip()
            return ""
        return os.environ.get(name, "")


def parse_remote(url: str) -> RemoteConfig:
    """The store that ``url`` names. Raises ValueError with what is wrong and what to write; never shows a password."""
    scheme, colon, rest = url.partition("://")
    if not colon or scheme not in _PARAMETERS:
        raise ValueError(f"remote: {scheme!r} is not a kind of store; write {_EXAMPLES}")
    if "@" in rest.partition("/")[0].partition("?")[0]:
        raise ValueError(
            f"remote: a {scheme}:// URL has no user or password; put them into KVHOLD_REMOTE_USER and "
            "KVHOLD_REMOTE_PASSWORD (for s3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY), or into a file that "
            "?secret_file= names"
        )
    parts = urlsplit(url)
    if parts.fragment:
        raise ValueError(f"remote: {url!r} has a '#', which means nothing here; leave it and what follows out")
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    given = dict(pairs)
    known = _PARAMETERS[scheme]
    for name, value in pairs:
        if name not in known:
            raise ValueError(f"remote: {scheme}:// has no parameter {name!r}; it has {', '.join(sorted(known))}")
        if not value:
            raise ValueError(f"remote: ?{name}= is empty; give it a value or leave it out")
    if len(given) < len(pairs):
        raise ValueError(f"remote: a parameter is there twice in {url!r}; write each once")
    pool = given.get("pool", "default")
    if not _NAME.fullmatch(pool):
        raise ValueError(f"remote: {pool!r} is not the name of a pool; use up to 64 letters, digits, '-', '_' and '.'")
    if scheme == "file":
        return _folder(url, parts.netloc, unquote(parts.path), pool, given.get("min_free"))
    if scheme == "s3":
        return _bucket(url, parts.netloc, unquote(parts.path), pool, given)
    if scheme == "mooncake":
        return _mooncake(url, parts.netloc, parts.path, pool, given)
    return _redis(url, scheme, parts.netloc, unquote(parts.path), pool, _secret_file(given))


def _secret_file(given: dict[str, str]) -> str:
    path = given.get("secret_file", "")
    if path and not Path(path).is_absolute():
        raise ValueError(
            f"remote: ?secret_file={path} is not an absolute path; write it like /etc/kvhold/remote.secret"
        )
    return path


def _folder(url: str, host: str, path: str, pool: str, min_free: str | None) -> RemoteConfig:
    if host or not path.startswith("/"):
        raise ValueError(f"remote: {url!r} is not file:///FOLDER; write three slashes and an absolute path")
    free = MIN_FREE
    if min_free is not None:
        try:
            free = parse_size(min_free)
        except ValueError as error:
            raise ValueError(f"remote: ?min_free=: {error}") from None
    return RemoteConfig(url, "file", pool, path=os.path.normpath(path), min_free=free)


def _bucket(url: str, bucket: str, path: str, pool: str, given: dict[str, str]) -> RemoteConfig:
    if not _BUCKET.fullmatch(bucket):
        raise ValueError(f"remote: {bucket!r} is not the name of a bucket; write s3://BUCKET/PREFIX?endpoint=URL")
    endpoint = given.get("endpoint", "")
    if endpoint and (urlsplit(endpoint).scheme not in ("http", "https") or not urlsplit(endpoint).hostname):
        raise ValueError(f"remote: ?endpoint={endpoint} is not a URL; write it like https://HOST:PORT")
    if endpoint and "@" in urlsplit(endpoint).netloc:
        raise ValueError("remote: an ?endpoint= has no user or password; put them into AWS_ACCESS_KEY_ID and so on")
    return RemoteConfig(
        url,
        "s3",
        pool,
        host=bucket,
        path=path.strip("/"),
        endpoint=endpoint,
        region=given.get("region", ""),
        secret_file=_secret_file(given),
    )


def _mooncake(url: str, address: str, path: str, pool: str, given: dict[str, str]) -> RemoteConfig:
    if path.strip("/"):
        raise ValueError(f"remote: {path!r} means nothing in mooncake://HOST:PORT; leave it out")
    if given.get("protocol", "tcp") != "tcp":
        raise ValueError(f"remote: ?protocol={given['protocol']} cannot be used; write protocol=tcp")
    try:
        host, port = parse_address(address)
    except ValueError as error:
        raise ValueError(f"remote: {error}") from None
    return RemoteConfig(url, "mooncake", pool, host=host, port=port, local=given.get("local", "127.0.0.1"))


def _redis(url: str, scheme: str, address: str, path: str, pool: str, secret_file: str) -> RemoteConfig:
    if scheme == "unix":
        if address or not path.startswith("/"):
            raise ValueError(f"remote: {url!r} is not unix:///SOCKET; write three slashes and an absolute path")
        return RemoteConfig(url, "unix", pool, path=path, secret_file=secret_file)
    database = path.strip("/") or "0"
    if not database.isdecimal() or len(database) > 5:
        raise ValueError(f"remote: {database!r} is not the number of a database; write {scheme}://HOST:PORT/0")
    try:
        host, port = parse_address(address or "127.0.0.1:6379")
    except ValueError as error:
        raise ValueError(f"remote: {error}") from None
    return RemoteConfig(url, scheme, pool, host=host, port=port, path=database, secret_file=secret_file)
