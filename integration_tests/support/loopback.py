"""A server of a test's own on loopback."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server(ThreadingHTTPServer):
    def handle_error(self, *_: Any) -> None:
        """A client that has gone is no error of the server's."""


@contextmanager
def served(handler: type[BaseHTTPRequestHandler], **given: Any) -> Iterator[str]:
    """A block in which ``handler``, with the attributes ``given``, answers at the address."""
    server = Server(("127.0.0.1", 0), type("Handler", (handler,), given))
    every = 0.01  # seconds at which it looks for its end
    thread = threading.Thread(target=server.serve_forever, args=(every,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
