"""Metrics and health over HTTP, from threads of their own; the loop is asked and never waits."""

import logging
import socket
import socketserver
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from kvhold.manager.config import ConfigError
from kvhold.manager.report import report
from kvhold.manager.server import Server

log = logging.getLogger(__name__)

ANSWER_SECONDS = 2.0
"""How long a scrape waits for the loop before it says that the manager is not well."""

COUNTERS = {
    "queries": "Queries answered.",
    "keys_asked": "Keys named in queries.",
    "keys_resident": "Of those, leading keys that were here.",
    "keys_not_stored": "Of those, keys at and after the first one that is not here.",
    "keys_budget": "Of those, keys cut off because too much is leased.",
    "commits": "Objects stored.",
    "duplicates": "Objects that were here already when they were committed.",
    "returns": "Granted slots that came back unused.",
    "stale": "Commits and returns of slots that are not (any more) the sender's.",
    "refused": "Sessions refused.",
    "purged": "Objects purged.",
}


class Collector:
    """One consistent report per scrape, as metrics."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def collect(self) -> Iterator[Metric]:
        said = self._server.call(lambda: report(self._server), ANSWER_SECONDS)
        state = GaugeMetricFamily(
            "kvhold_arena_state_bytes",
            "Arena bytes by exclusive state; the sum is kvhold_arena_bytes.",
            labels=["state"],
        )
        for name, value in said["accounts"].items():
            state.add_metric([name], value)
        yield state
        yield GaugeMetricFamily("kvhold_arena_bytes", "Populated bytes of the arena.", value=said["arena"]["populated"])
        yield GaugeMetricFamily(
            "kvhold_limbo_bytes", "Bytes of lost, not proved dead owners.", value=said["limbo_bytes"]
        )
        yield GaugeMetricFamily("kvhold_objects", "Objects stored.", value=said["objects"])
        yield GaugeMetricFamily(
            "kvhold_sessions", "Sessions of engines.", value=sum(session["open"] for session in said["sessions"])
        )
        yield CounterMetricFamily("kvhold_evicted", "Objects evicted to make room.", value=said["evicted"])
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"kvhold_{name}", text, value=said["counters"].get(name, 0))


def serve_http(server: Server, host: str, port: int) -> str:
    """Serve ``/metrics`` and ``/healthz`` from daemon threads; the URL. Raises ConfigError for an unusable address."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(server))  # type: ignore[arg-type]

    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            try:
                if self.path == "/metrics":
                    self._reply(200, CONTENT_TYPE_LATEST, generate_latest(registry))
                elif self.path == "/healthz":
                    server.call(lambda: None, ANSWER_SECONDS)
                    self._reply(200, "text/plain", b"ok\n")
                else:
                    self._reply(404, "text/plain", b"/metrics or /healthz\n")
            except TimeoutError:
                self._reply(503, "text/plain", b"the manager's loop does not answer\n")

        def _reply(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            log.debug(format, *args)

    class Http(ThreadingHTTPServer):
        daemon_threads = True
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def server_bind(self) -> None:
            # HTTPServer's own asks the name service, perhaps for seconds, for a name that nobody needs.
            socketserver.TCPServer.server_bind(self)

        def handle_error(self, request: Any, client_address: Any) -> None:
            log.debug("request of %s failed", client_address, exc_info=True)

    shown = f"[{host}]" if ":" in host else host
    try:
        http = Http((host, port), Handler)
    except OSError as error:
        raise ConfigError(f"http: {shown}:{port} cannot be bound: {error.strerror}") from None
    threading.Thread(target=http.serve_forever, name="kvhold-http", daemon=True).start()
    return f"http://{shown}:{http.server_address[1]}"
