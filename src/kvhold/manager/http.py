"""Metrics and health over HTTP, from threads of their own; the loop is asked and never waits."""

import logging
import socket
import socketserver
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from kvhold.manager.config import ConfigError
from kvhold.manager.metrics import ANSWER_SECONDS, Collector
from kvhold.manager.server import Server

log = logging.getLogger(__name__)


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
        raise ConfigError(
            f"http: {shown}:{port} cannot be bound: {error.strerror}; give an address of this host and a free port, "
            "e.g. 127.0.0.1:9464"
        ) from None
    threading.Thread(target=http.serve_forever, name="kvhold-http", daemon=True).start()
    return f"http://{shown}:{http.server_address[1]}"
