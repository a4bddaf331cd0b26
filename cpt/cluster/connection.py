"""Lines of JSON between two processes, each with a deadline."""

import json
import socket
import time
from typing import Any

LONGEST_LINE = 64 * 2**20


class Connection:
    """One end of it."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.received = bytearray()

    def fileno(self) -> int:
        """For selectors."""
        return self.end.fileno()

    def send(self, value: Any, seconds: float) -> None:
        """All of it.

        Raises:
            OSError: the other end is gone or takes nothing.
        """
        self.end.settimeout(max(seconds, 0.01))
        self.end.sendall(json.dumps(value).encode() + b"\n")

    def receive(self, seconds: float) -> Any:
        """The next value.

        Raises:
            OSError: the other end is gone or says nothing; TimeoutError is one of them.
            ValueError: what it says is no line of ours.
        """
        until = time.monotonic() + seconds
        while (value := self.next_value()) is None:
            self.end.settimeout(max(until - time.monotonic(), 0.01))
            self.read()
        return value

    def read(self) -> None:
        """What has come by now, or the next that comes.

        Raises:
            OSError: as `receive`.
            ValueError: it is too long for a line of ours.
        """
        block = self.end.recv(1 << 16)
        if not block:
            raise ConnectionError("it closed the connection")
        self.received += block
        if len(self.received) > LONGEST_LINE:
            raise ValueError("a line without an end")

    def next_value(self) -> Any | None:
        """A line that is here already, None where there is none."""
        line, newline, rest = bytes(self.received).partition(b"\n") if b"\n" in self.received else (b"", b"", b"")
        if not newline:
            return None
        self.received = bytearray(rest)
        return json.loads(line)

    def close(self) -> None:
        """Hang up."""
        self.end.close()
