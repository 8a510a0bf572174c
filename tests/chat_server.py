"""A chat server of our own making, to misbehave as real ones do: it writes bytes onto real sockets."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self


@dataclass(frozen=True)
class Asked:
    """A request as it arrived. `number`: from 0, in the order of arrival; `at`: by the monotonic clock."""

    number: int
    path: str
    headers: Mapping[str, str]
    body: dict
    at: float

    @property
    def said(self) -> str:
        """The newest message."""
        return self.body["messages"][-1]["content"]


Answer = Callable[[Asked], Iterable[bytes]]
"""What is written onto the socket, piece by piece; the connection is closed behind it."""


def response(body: bytes | str, status: str = "200 OK", **headers: str) -> list[bytes]:
    """A whole response. In header names `_` is a hyphen."""
    content = body if isinstance(body, bytes) else body.encode()
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(content)}", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ["\r\n".join([*lines, "", ""]).encode() + content]


def says(text: str | None, *, usage: object = None, finish: str = "stop", **message: object) -> list[bytes]:
    """A chat completion."""
    choice = {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": text, **message}}
    return response(json.dumps({"object": "chat.completion", "choices": [choice], "usage": usage}))


def refuses(status: str, code: str = "", message: str = "no", **headers: str) -> list[bytes]:
    """An error in OpenAI's form."""
    return response(json.dumps({"error": {"message": message, "code": code}}), status, **headers)


def drips(pieces: Iterable[bytes], seconds: float) -> Iterable[bytes]:
    """One byte at a time."""
    for piece in pieces:
        for byte in piece:
            yield bytes([byte])
            time.sleep(seconds)


@dataclass
class ChatServer:
    """Listens on a free port of the loopback interface while it is entered."""

    answer: Answer
    asked: list[Asked] = field(default_factory=list)
    url: str = ""
    at_once: int = 0
    """The most requests that were answered at the same time."""

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"
        self._lock, self._busy = threading.Lock(), 0
        self._threads = [threading.Thread(target=self._listen)]
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        # Closing alone leaves a thread in accept.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,))
            thread.start()
            self._threads.append(thread)

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as stream:
            try:
                first, *lines = iter(stream.readline, b"\r\n")
                headers = dict(line.decode().rstrip().lower().split(": ", 1) for line in lines)
                body = json.loads(stream.read(int(headers["content-length"])))
            except (ValueError, OSError):
                return
            with self._lock:
                self.asked.append(Asked(len(self.asked), first.split()[1].decode(), headers, body, time.monotonic()))
                asked = self.asked[-1]
                self._busy += 1
                self.at_once = max(self.at_once, self._busy)
            try:
                for piece in self.answer(asked):
                    connection.sendall(piece)
            except OSError:
                pass
            finally:
                with self._lock:
                    self._busy -= 1
