"""A proxy whose connections may stop passing anything on, without being closed."""

import socket
import threading


class SilentProxy:
    """Passes connections on to a server until told to `hush`: those that are open then stay open, and pass nothing."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._server = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._hushed: set[socket.socket] = set()
        self._open: list[socket.socket] = []
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def connections(self) -> int:
        return len(self._open) // 2

    def hush(self) -> None:
        self._hushed.update(self._open)

    def close(self) -> None:
        for each in (self._listener, *self._open):
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                ours, _ = self._listener.accept()
            except OSError:
                return
            theirs = socket.create_connection(self._server)
            self._open += (ours, theirs)
            for pair in ((ours, theirs), (theirs, ours)):
                threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65_536):
                if source not in self._hushed:
                    target.sendall(data)
        except OSError:
            pass
