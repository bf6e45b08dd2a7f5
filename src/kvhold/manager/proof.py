"""Who is on the other end of a Unix socket, and the proof that it is gone."""

import os
import socket

from kvhold.host import peer

_SO_PEERPIDFD = 77


class UnknownPeer(Exception):
    """The peer is not ours, or its end could not be proved."""


def peer_pidfd(connection: socket.socket) -> tuple[int, int]:
    """(pid, pidfd) of the process that connected. Raises UnknownPeer for another user or an unprovable process."""
    pid, uid = peer(connection)
    if uid != os.getuid():
        raise UnknownPeer(f"user {uid} is not the manager's user {os.getuid()}")
    try:
        return pid, int.from_bytes(connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4), "little")
    except OSError:
        pass  # Linux before 6.5
    if pid == 0:
        raise UnknownPeer("the process lives in another PID namespace; share the host's (docker: --pid=host)")
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        raise UnknownPeer(f"process {pid} cannot be watched: {error.strerror}") from None
    try:
        gone = connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        gone = False
    if gone:  # its number may belong to somebody else by now
        os.close(pidfd)
        raise UnknownPeer(f"process {pid} has left")
    return pid, pidfd
