"""Metrics and health over HTTP: what is answered to whom, and that whoever is slow keeps nobody else waiting."""

import os
import select
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest
from testbed.process.manager_process import Manager
from testbed.process.peers import http_address, status, until

from kvhold.manager.http import MAX_CONNECTIONS, MAX_HEAD

Serve = Callable[..., Manager]
DEADLINE = 60.0


@pytest.fixture
def manager(serve: Serve) -> Manager:
    return serve("--http", "127.0.0.1:0", dram="8MiB")


def address(manager: Manager) -> tuple[str, int]:
    found = urlsplit(http_address(manager.log))
    assert found.hostname is not None
    assert found.port is not None
    return found.hostname, found.port


def ask(manager: Manager, method: str, path: str, body: bytes | None = None) -> tuple[int, dict[str, str], str]:
    """Status, headers and body."""
    connection = HTTPConnection(*address(manager), timeout=DEADLINE)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


def say(manager: Manager, text: bytes) -> socket.socket:
    """A connection over which ``text`` was sent."""
    made = socket.create_connection(address(manager), timeout=DEADLINE)
    made.sendall(text)
    return made


def hear(connection: socket.socket) -> str:
    """All that the other side says."""
    with connection:
        return b"".join(iter(lambda: connection.recv(4096), b"")).decode()


def said_anything(connections: list[socket.socket]) -> list[socket.socket]:
    """Those that were answered or closed."""
    poller = select.poll()
    by_number = {each.fileno(): each for each in connections}
    for number in by_number:
        poller.register(number, select.POLLIN | select.POLLRDHUP)
    return [by_number[number] for number, _ in poller.poll(0)]


@contextmanager
def slow(manager: Manager, count: int, text: bytes = b"GET /metrics HT") -> Iterator[list[socket.socket]]:
    """So many connections that have begun to ask and do not go on."""
    made: list[socket.socket] = []
    try:
        for _ in range(count):
            made.append(say(manager, text))
        yield made
    finally:
        for each in made:
            each.close()


@pytest.mark.parametrize("path", ["/metrics", "/healthz"])
def test_a_query_and_a_fragment_name_the_same_page(manager: Manager, path: str) -> None:
    for more in ("", "?", "?x=1", "?a=/b", "#c"):
        assert ask(manager, "GET", path + more)[0] == 200
    assert ask(manager, "GET", f"http://somewhere{path}?x=1")[0] == 200
    for other in ("/", "/metrics/", "/x?/metrics", "//metrics", "/healthz2"):
        assert ask(manager, "GET", other)[::2] == (404, "/metrics or /healthz\n")


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/none"])
def test_head_has_the_headers_of_get(manager: Manager, path: str) -> None:
    code, headers, text = ask(manager, "GET", path)
    head = ask(manager, "HEAD", path)
    assert (head[0], head[2]) == (code, "")
    assert head[1]["Content-Type"] == headers["Content-Type"]
    if path != "/metrics":  # which is another one each time
        assert head[1] == headers
        assert int(headers["Content-Length"]) == len(text)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_other_methods_are_not_allowed_and_told_which_are(manager: Manager, method: str) -> None:
    code, headers, _ = ask(manager, method, "/metrics", body=b"x" * 10_000)
    assert (code, headers["Allow"]) == (405, "GET, HEAD")
    assert ask(manager, method, "/none")[0] == 404


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b"GET /metrics\r\n\r\n", 400),
        (b"GET  /metrics HTTP/1.1\r\n\r\n", 400),
        (b"\xff\xfe /metrics HTTP/1.1\r\n\r\n", 400),
        (b"GET //[ HTTP/1.1\r\n\r\n", 400),
        (b"GET /metrics HTTP/2.0\r\n\r\n", 505),
        (b"GET /" + b"x" * 2 * MAX_HEAD, 431),
        (b"GET /metrics HTTP/1.1\r\n" + b"A: b\r\n" * MAX_HEAD, 431),
    ],
)
def test_what_is_no_request_is_told_so(manager: Manager, text: bytes, code: int) -> None:
    assert hear(say(manager, text)).startswith(f"HTTP/1.1 {code} ")
    assert ask(manager, "GET", "/healthz")[0] == 200


def test_slow_ones_keep_nobody_waiting(manager: Manager) -> None:
    """By order: another is answered while none of them has been, and no thread is theirs."""
    threads = len(os.listdir(f"/proc/{manager.pid}/task"))
    with slow(manager, MAX_CONNECTIONS - 1) as connections:
        for path in ("/metrics", "/healthz", "/metrics?x=1"):
            assert ask(manager, "GET", path)[0] == 200
        assert said_anything(connections) == []
        assert len(os.listdir(f"/proc/{manager.pid}/task")) <= threads
        connections[0].sendall(b"TP/1.1\r\n\r\n")
        assert hear(connections[0]).startswith("HTTP/1.1 200 ")


def test_beyond_the_limit_those_go_first_that_have_waited_longest(manager: Manager) -> None:
    files = len(os.listdir(f"/proc/{manager.pid}/fd"))
    with slow(manager, 2 * MAX_CONNECTIONS) as connections:
        assert ask(manager, "GET", "/metrics")[0] == 200
        until(lambda: len(said_anything(connections)) == MAX_CONNECTIONS + 1, "the surplus is closed")
        assert set(said_anything(connections)) == set(connections[: MAX_CONNECTIONS + 1])
        # One more is taken in before the one that has waited longest goes.
        until(lambda: len(os.listdir(f"/proc/{manager.pid}/fd")) <= files + MAX_CONNECTIONS, "no more are open")
    until(lambda: len(os.listdir(f"/proc/{manager.pid}/fd")) <= files, "their descriptors are closed")
    assert status(manager.socket)["arena"]["bytes"] == 8 << 20


def test_those_that_do_not_take_their_answer_go_too(manager: Manager) -> None:
    with slow(manager, MAX_CONNECTIONS, b"GET /metrics HTTP/1.1\r\n\r\n") as connections:
        until(lambda: len(said_anything(connections)) == MAX_CONNECTIONS, "all are answered")
        assert ask(manager, "GET", "/metrics")[0] == 200


def test_who_never_asks_is_let_go(serve: Serve) -> None:
    hasty = "import kvhold.manager.http as h; from kvhold.cli import main; h.SECONDS = 0.2; main()"
    manager = serve("--http", "127.0.0.1:0", dram="8MiB", program=("-c", hasty))
    assert hear(say(manager, b"GET /met")).startswith("HTTP/1.1 408 ")


def test_listening_to_the_world_is_said(serve: Serve, manager: Manager) -> None:
    assert "WARNING http:" not in manager.log_tail()
    manager.kill()
    manager = serve("--http", "0.0.0.0:0", dram="8MiB")
    said = manager.log_tail()
    assert "WARNING http: whoever reaches 0.0.0.0, port" in said
    assert "bind it to 127.0.0.1, or to an address that only your monitoring reaches" in said
