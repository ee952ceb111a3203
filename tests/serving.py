"""Servers of tests' own."""

import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def serving(handler: Callable) -> Iterator[int]:
    """Answer as `handler` does, on this machine alone; yields the port."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


class Quiet:
    """For handlers: nothing on stderr."""

    def log_message(self, *args: object) -> None:
        pass


class QuietFolder(Quiet, http.server.SimpleHTTPRequestHandler):
    """Python's own server of a folder: `serving(partial(QuietFolder, directory=folder))`."""
