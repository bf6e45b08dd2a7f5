"""Metrics and health over HTTP, from one thread of its own: it asks the loop and never keeps it waiting.

Whoever is slow keeps nobody waiting but itself, and what all connections may take is bounded.
"""

import asyncio
import ipaddress
import logging
import socket
import threading
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from kvhold.manager.config import ConfigError
from kvhold.manager.metrics import metrics
from kvhold.manager.server import Server

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
"""Beyond so many, the one is closed that has been open longest, first of those that have not asked for anything yet."""
BACKLOG = 128
SECONDS = 10.0
"""How long a client may take to ask, and again to take its answer."""
ANSWER_SECONDS = 2.0
"""How long the loop may take to say what it knows before the manager counts as not well."""
MAX_HEAD = 8 << 10
"""Bytes of a request's line and headers. A body is not read."""
LEFT_OVER = 64 << 10
"""What a client has sent beyond that is taken, so that it reads its answer, up to so many bytes."""
_METHODS = ("GET", "HEAD")
_TEXT = "text/plain; charset=utf-8"


def serve_http(server: Server, host: str, port: int) -> str:
    """Serve ``/metrics`` and ``/healthz`` from a daemon thread; the URL. Raises ConfigError for an unusable address."""
    shown = f"[{host}]" if ":" in host else host
    try:
        listening = _bind(host, port)
    except OSError as error:
        raise ConfigError(
            f"http: {shown}:{port} cannot be bound: {error.strerror}; give an address of this host and a free port, "
            "e.g. 127.0.0.1:9464"
        ) from None
    address, port = listening.getsockname()[:2]
    if not _is_loopback(address):
        log.warning(
            "http: whoever reaches %s, port %d, may read how much this manager holds and what is served, without a "
            "password; bind it to 127.0.0.1, or to an address that only your monitoring reaches",
            address,
            port,
        )
    http = _Http(server)
    threading.Thread(target=lambda: asyncio.run(http.serve(listening)), name="kvhold-http", daemon=True).start()
    return f"http://{shown}:{port}"


class _Http:
    """The connections. All of it runs on one thread's event loop."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._waiting: dict[asyncio.WriteTransport, None] = {}  # those that have not asked yet, the oldest first
        self._asked: dict[asyncio.WriteTransport, None] = {}  # and all others
        self._report: asyncio.Future[dict[str, Any]] | None = None

    async def serve(self, listening: socket.socket) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: log.debug("http: %s", context["message"]))
        server = await asyncio.start_server(self._connected, sock=listening, backlog=BACKLOG, limit=MAX_HEAD)
        await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        transport = writer.transport
        if len(self._waiting) + len(self._asked) >= MAX_CONNECTIONS:
            others = self._waiting or self._asked
            oldest = next(iter(others))
            del others[oldest]
            oldest.abort()
        self._waiting[transport] = None
        try:
            async with asyncio.timeout(SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
            if transport in self._waiting:
                del self._waiting[transport]
                self._asked[transport] = None
            answer = await self._answer(head)
        except asyncio.LimitOverrunError:
            answer = _reply(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"a request has at most {MAX_HEAD} bytes\n")
        except TimeoutError:
            answer = _reply(HTTPStatus.REQUEST_TIMEOUT, f"no whole request within {SECONDS:g} s\n")
        except (asyncio.IncompleteReadError, OSError):
            answer = b""
        try:
            async with asyncio.timeout(SECONDS):
                writer.write(answer)
                await writer.drain()
                writer.write_eof()
                await _swallow(reader)
        except (TimeoutError, OSError):
            pass
        finally:
            transport.abort()
            self._waiting.pop(transport, None)
            self._asked.pop(transport, None)

    async def _answer(self, head: bytes) -> bytes:
        """The whole answer to a request's line and headers."""
        try:
            method, target, version = head.split(b"\r\n", 1)[0].decode("ascii").split(" ")
            path = urlsplit(target).path
        except ValueError:
            return _reply(HTTPStatus.BAD_REQUEST, "this is no request of HTTP/1.1\n")
        if not version.startswith("HTTP/1."):
            return _reply(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "HTTP/1.1 is spoken here\n")
        if path not in ("/metrics", "/healthz"):
            return _reply(HTTPStatus.NOT_FOUND, "/metrics or /healthz\n", method)
        if method not in _METHODS:
            return _reply(HTTPStatus.METHOD_NOT_ALLOWED, "GET or HEAD\n", method, Allow=", ".join(_METHODS))
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                if path == "/healthz":
                    await asyncio.wrap_future(self._server.ask(lambda: None))
                    return _reply(HTTPStatus.OK, "ok\n", method)
                said = await self._said()
        except TimeoutError:
            return _reply(HTTPStatus.SERVICE_UNAVAILABLE, "the manager's loop does not answer\n", method)
        text = generate_latest(_Scrape(said))  # type: ignore[arg-type]
        return _reply(HTTPStatus.OK, text.decode(), method, kind=CONTENT_TYPE_LATEST)

    async def _said(self) -> dict[str, Any]:
        """The manager's report: one that is asked for now, for all who ask meanwhile."""
        if self._report is None or self._report.done():
            self._report = asyncio.wrap_future(self._server.ask_report())
        return await asyncio.shield(self._report)


class _Scrape:
    """What prometheus_client takes for a registry."""

    def __init__(self, said: dict[str, Any]) -> None:
        self._said = said

    def collect(self) -> Iterator[Metric]:
        return metrics(self._said)


async def _swallow(reader: asyncio.StreamReader) -> None:
    """Read on until the client closes: with anything unread, closing here would take its answer away from it."""
    left = LEFT_OVER
    while left > 0 and (more := await reader.read(MAX_HEAD)):
        left -= len(more)


def _reply(status: HTTPStatus, body: str, method: str = "GET", *, kind: str = _TEXT, **headers: str) -> bytes:
    text = body.encode()
    headers = {"Content-Type": kind, "Content-Length": str(len(text)), "Connection": "close", **headers}
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{name}: {value}" for name, value in headers.items())]
    head = "".join(f"{line}\r\n" for line in lines) + "\r\n"
    return head.encode() + (b"" if method == "HEAD" else text)


def _bind(host: str, port: int) -> socket.socket:
    """A socket bound to the first address of ``host``. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(BACKLOG)
    except OSError:
        bound.close()
        raise
    bound.setblocking(False)
    return bound


def _is_loopback(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback
