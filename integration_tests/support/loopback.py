"""A server of a test's own on loopback."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server(ThreadingHTTPServer):
    def serve_forever(self, poll_interval: float = 0.5) -> None:
        """Answer until `shutdown`, which the inherited loop notices up to half a second later."""
        while True:
            try:
                request, address = self.get_request()
            except OSError:  # shut down
                return
            self.process_request(request, address)

    def shutdown(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)  # ends the accept that waits

    def handle_error(self, *_: Any) -> None:
        """A client that has gone is no error of the server's."""


@contextmanager
def served(handler: type[BaseHTTPRequestHandler], **given: Any) -> Iterator[str]:
    """A block in which ``handler``, with the attributes ``given``, answers at the address."""
    server = Server(("127.0.0.1", 0), type("Handler", (handler,), given))
    thread = threading.Thread(
        target=server.serve_forever, args=(0.01,), daemon=True
    )  # seconds until it sees its end
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
