"""A server of a folder over HTTP, and of the same folder as an S3 bucket, that misbehaves when told to.

    python -m tests.hardening.faults.bad_server FOLDER

prints its port, and ends with its input. `GET /:set?kind=cut&skip=2&times=1` lets two answers pass and spoils the
next one; `times=-1` all that follow. Standard library alone: it starts at once.
"""

import os
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlsplit

KINDS = ("500", "503", "stall", "stall body", "cut", "long", "short", "reset", "no range", "other range")
BUCKET = "bucket"
_STALL_S = 5.0


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, root: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.root, self.lock = root, threading.Lock()
        self.kind, self.skip, self.times, self.hits = "", 0, 0, 0

    def fault(self) -> str:
        """What is to happen to the next answer."""
        with self.lock:
            if self.skip > 0:
                self.skip -= 1
            elif self.kind and self.times:
                self.times -= 1
                self.hits += 1
                return self.kind
            return ""

    def handle_error(self, request, client_address):
        pass  # clients hang up


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        parts = urlsplit(self.path)
        if parts.path == "/:set":
            told = dict(parse_qsl(parts.query))
            with self.server.lock:
                hits, self.server.hits = self.server.hits, 0
                self.server.kind, self.server.skip = told.get("kind", ""), int(told.get("skip", 0))
                self.server.times = int(told.get("times", -1))
            self._send(200, str(hits).encode())
        else:
            self._answer()

    def _answer(self) -> None:
        parts, query = urlsplit(self.path), dict(parse_qsl(urlsplit(self.path).query))
        path = unquote(parts.path).lstrip("/")
        if path.rstrip("/") == BUCKET:
            self._send(200, self._bucket(query.get("prefix", "")), **{"Content-Type": "application/xml"})
            return
        place = self.server.root / path.removeprefix(BUCKET + "/")
        if not place.exists() or (place.is_dir() and path.startswith(BUCKET)):
            self._send(404, b"")
        elif place.is_dir():
            names = sorted(entry.name + "/" * entry.is_dir() for entry in place.iterdir())
            links = "".join(f'<a href="{quote(name)}">x</a>' for name in names)
            self._send(200, links.encode(), **{"Content-Type": "text/html"})
        else:
            self._file(place)

    def _bucket(self, prefix: str) -> bytes:
        files = (path for path in sorted(self.server.root.rglob("*")) if path.is_file())
        names = {path.relative_to(self.server.root).as_posix(): path.stat().st_size for path in files}
        rows = "".join(
            f"<Contents><Key>{name}</Key><LastModified>2025-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>&quot;1&quot;</ETag><Size>{size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            for name, size in names.items()
            if name.startswith(prefix)
        )
        head = f"<Name>{BUCKET}</Name><Prefix>{prefix}</Prefix><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>"
        namespace = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
        return f'<?xml version="1.0"?><ListBucketResult {namespace}>{head}{rows}</ListBucketResult>'.encode()

    def _file(self, place: Path) -> None:
        data, status, headers = place.read_bytes(), 200, {}
        asked = self.headers.get("Range", "")
        if asked.startswith("bytes="):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last or len(data) - 1), len(data) - 1)
            if start >= len(data):
                self._send(416, b"")
                return
            headers = {"Content-Range": f"bytes {start}-{end}/{len(data)}"}
            data, status = data[start : end + 1], 206
        about = {"ETag": '"1"', "Last-Modified": formatdate(place.stat().st_mtime, usegmt=True)}
        self._send(status, data, whole=place, **about, **headers)

    def _send(self, status: int, data: bytes, whole: Path | None = None, **headers: str) -> None:
        fault = self.server.fault() if self.path.partition("?")[0] != "/:set" else ""
        length, sent = len(data), len(data)
        if fault in ("500", "503"):
            status, data, length, sent = int(fault), b"", 0, 0
            headers = {"Retry-After": "0"} if fault == "503" else {}
        elif fault == "stall":
            time.sleep(_STALL_S)
            self.close_connection = True
            return
        elif fault == "reset":
            number = self.connection.fileno()
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.detach()  # so that nothing shuts it down in order
            os.close(number)
            raise ConnectionResetError
        elif fault in ("cut", "stall body"):
            sent = length // 2
        elif fault == "long":
            length += 1000
        elif fault == "short":
            length = sent = length // 2
        elif fault == "no range" and whole is not None and status == 206:
            status, data = 200, whole.read_bytes()
            headers.pop("Content-Range", None)
            length = sent = len(data)
        elif fault == "other range" and "Content-Range" in headers and length > 1:  # fewer bytes than were asked for
            length = sent = length // 2
            first, _, total = headers["Content-Range"].removeprefix("bytes ").replace("/", "-").split("-")
            headers["Content-Range"] = f"bytes {first}-{int(first) + length - 1}/{total}"
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(length), "Accept-Ranges": "bytes"}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:sent])
            self.wfile.flush()
        if fault == "stall body":
            time.sleep(_STALL_S)
        if fault in ("cut", "stall body", "long"):
            self.close_connection = True


def tell(port: int, kind: str = "", skip: int = 0, times: int = -1) -> int:
    """Set what is to happen; how often it has happened since the last time."""
    query = f"kind={quote(kind)}&skip={skip}&times={times}"
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/:set?{query}", timeout=10) as answer:
        return int(answer.read())


@contextmanager
def serving(root: Path) -> Iterator[int]:
    """The server in a process of its own: its port."""
    command = [sys.executable, "-m", __name__, str(root)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


if __name__ == "__main__":
    server = Server(Path(sys.argv[1]))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()
    os._exit(0)
