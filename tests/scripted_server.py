"""A server that answers as a test tells it to, and the ways in which it can fail."""

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.serving import Quiet


class ScriptedServer(http.server.ThreadingHTTPServer):
    """Answers from `files`, after what `script` has for a path: functions that are called with the handler, once each.

    `asked` lists (path, range) of all requests, `connections` counts what was accepted.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, handler: type):
        super().__init__(("127.0.0.1", 0), handler)
        self.files: dict[str, bytes] = {}
        self.script: dict[str, list] = {}
        self.asked: list[tuple[str, str | None]] = []
        self.tags: dict[str, str] = {}
        self.authorization: list[str | None] = []
        self.connections = 0
        self.sent = 0
        self.over = threading.Event()
        self.closed = threading.Semaphore(0)  # released for each connection that ended here

    def get_request(self):
        self.connections += 1
        return super().get_request()

    def shutdown_request(self, request):
        super().shutdown_request(request)
        self.closed.release()

    def handle_error(self, request, client_address):
        """Clients that hang up are no news."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(Quiet, http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self):
        own = self.server
        path = self.path.partition("?")[0]
        own.asked.append((self.path, self.headers["Range"]))
        own.authorization.append(self.headers["Authorization"])
        if own.script.get(path):
            return own.script[path].pop(0)(self)
        return self.answer(own.files.get(path))

    def answer(self, data: bytes | None) -> None:
        if data is None:
            return self.say(404, b"nothing here")
        headers = {"Content-Type": "text/html" if self.path.partition("?")[0].endswith("/") else "image/jpeg"}
        if tag := self.server.tags.get(self.path.partition("?")[0]):
            headers["ETag"] = tag
        if not (asked := self.headers["Range"]):
            return self.say(200, data, **headers)
        start, end = (int(part) for part in asked.removeprefix("bytes=").split("-"))
        if start >= len(data):
            return self.say(416)
        part = data[start : end + 1]
        return self.say(206, part, **headers, **{"Content-Range": f"bytes {start}-{start + len(part) - 1}/{len(data)}"})

    def say(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)
        self.server.sent += len(body)

    def whole(self) -> bytes:
        return self.server.files[self.path.partition("?")[0]]


@contextmanager
def serve_script(handler: type = Handler) -> Iterator[ScriptedServer]:
    server = ScriptedServer(handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        server.shutdown()
        server.server_close()
        thread.join()


def status(code: int, **headers: str):
    return lambda handler: handler.say(code, b"no", **headers)


def cut(handler: Handler) -> None:
    """Half a body, then the connection ends."""
    handler.say(200, handler.whole()[:-5], **{"Content-Length": str(len(handler.whole()))})
    handler.close_connection = True


def drop(handler: Handler) -> None:
    """No answer at all."""
    handler.close_connection = True


def stall(handler: Handler) -> None:
    """Half a body, then nothing, the connection open."""
    cut(handler)
    handler.server.over.wait(60)


def noise(handler: Handler) -> None:
    handler.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n")
    handler.close_connection = True
