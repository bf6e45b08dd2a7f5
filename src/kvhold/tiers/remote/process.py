"""The manager's hold on the process that speaks to the store: started, told, killed, and proved dead."""

import os
import socket
import subprocess
import sys

from kvhold.tiers.remote import messages as ms
from kvhold.tiers.remote.url import RemoteConfig

_BUFFER = 1 << 20


class Child:
    """A process with the arena and one end of a socket pair.

    ``pidfd`` is readable once it is dead: then it touches no memory any more.
    """

    def __init__(self, config: RemoteConfig, arena_fd: int, arena_bytes: int, read_only: bool) -> None:
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.channel.setblocking(False)
            for end in (self.channel, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
            numbers = (arena_fd, arena_bytes, theirs.fileno(), os.getpid(), int(read_only))
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "kvhold.tiers.remote", config.url, *map(str, numbers)],
                pass_fds=(arena_fd, theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # stores' libraries say much there; what matters is in answers
            )
        except BaseException:
            self.channel.close()
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)
        self.ready = False
        self.killed = False

    def send(self, call: ms.Call) -> bool:
        """Whether it was told; if not, it takes nothing at present, or is about to be found dead."""
        try:
            self.channel.send(ms.encode(call))
        except (BlockingIOError, ConnectionError):
            return False
        return True

    def receive(self) -> ms.Answer | None:
        """What it says, None if there is nothing now. EOFError: it says nothing any more; ValueError: nonsense."""
        try:
            data = self.channel.recv(ms.LARGEST)
        except BlockingIOError:
            return None
        except ConnectionError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        return ms.decode_answer(data)

    def kill(self) -> None:
        self.killed = True
        self._process.kill()

    def bury(self) -> int:
        """After the pidfd said that it is dead: nothing of it is left. Its exit status."""
        status = self._process.wait()
        os.close(self.pidfd)
        self.channel.close()
        return status
