"""A server that misbehaves on request. It serves a folder over HTTP, and the same folder as an S3 bucket.

    python -m tests.hardening.faults.bad_server FOLDER

It prints its port and ends with its input. `GET /:set?kind=cut&skip=2&times=1` spoils the third answer from then on;
`times=-1` spoils all later ones. It needs only the standard library, so that it starts at once.
"""

import os
import re
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

    def set_fault(self, kind: str = "", skip: str = "0", times: str = "-1") -> int:
        """Set the faults to come; return how many there were since the last call."""
        with self.lock:
            self.kind, self.skip, self.times = kind, int(skip), int(times)
            hits, self.hits = self.hits, 0
            return hits

    def next_fault(self) -> str:
        """Return the fault of the next answer; "" for none."""
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

    def do_GET(self):
        parts = urlsplit(self.path)
        path, query = unquote(parts.path).lstrip("/"), dict(parse_qsl(parts.query))
        place = self.server.root / path.removeprefix(BUCKET + "/")
        if parts.path == "/:set":
            self._write(200, str(self.server.set_fault(**query)).encode(), {})
        elif path.rstrip("/") == BUCKET:
            self._send(200, self._list_bucket(query.get("prefix", "")), {"Content-Type": "application/xml"})
        elif place.is_file():
            self._send_file(place)
        elif place.is_dir() and not path.startswith(BUCKET):
            names = sorted(entry.name + "/" * entry.is_dir() for entry in place.iterdir())
            links = "".join(f'<a href="{quote(name)}">x</a>' for name in names)
            self._send(200, links.encode(), {"Content-Type": "text/html"})
        else:
            self._send(404, b"", {})

    do_HEAD = do_GET

    def _list_bucket(self, prefix: str) -> bytes:
        root = self.server.root
        files = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*")) if path.is_file()}
        rows = "".join(
            f"<Contents><Key>{name}</Key><LastModified>2025-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>&quot;1&quot;</ETag><Size>{path.stat().st_size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            for name, path in files.items()
            if name.startswith(prefix)
        )
        head = f"<Name>{BUCKET}</Name><Prefix>{prefix}</Prefix><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>"
        namespace = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
        return f'<?xml version="1.0"?><ListBucketResult {namespace}>{head}{rows}</ListBucketResult>'.encode()

    def _send_file(self, place: Path) -> None:
        data, headers = place.read_bytes(), {"ETag": '"1"'}
        headers["Last-Modified"] = formatdate(place.stat().st_mtime, usegmt=True)
        asked = self.headers.get("Range", "")
        if not asked.startswith("bytes="):
            self._send(200, data, headers)
            return
        first, _, last = asked.removeprefix("bytes=").partition("-")
        part = data[int(first) : int(last) + 1 if last else None]
        if part:
            headers["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
            self._send(206, part, headers, whole=data)
        else:
            self._send(416, b"", {})

    def _send(self, status: int, data: bytes, headers: dict[str, str], whole: bytes | None = None) -> None:
        """Send an answer with the fault that is due. `whole`: The file, of which `data` is a range."""
        fault = self.server.next_fault()
        if fault == "stall":
            time.sleep(_STALL_S)
            self.close_connection = True
            return
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(self.connection.detach())  # without detach, the connection would be shut down in order
            raise ConnectionResetError
        if fault in ("500", "503"):
            status, data, headers = int(fault), b"", {"Retry-After": "0"} if fault == "503" else {}
        elif fault == "no range" and whole is not None:
            status, data = 200, whole
            del headers["Content-Range"]
        elif fault == "short":
            data = data[: len(data) // 2]
        elif fault == "other range" and whole is not None and len(data) > 1:  # fewer bytes than were asked for
            data = data[: len(data) // 2]
            start, size = int(re.search(r"\d+", headers["Content-Range"])[0]), len(whole)
            headers["Content-Range"] = f"bytes {start}-{start + len(data) - 1}/{size}"
        self._write(status, data, headers, fault)

    def _write(self, status: int, data: bytes, headers: dict[str, str], fault: str = "") -> None:
        length = len(data) + (1000 if fault == "long" else 0)
        is_cut = fault in ("cut", "stall body")
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(length), "Accept-Ranges": "bytes"}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if is_cut else data)
            self.wfile.flush()
        if fault == "stall body":
            time.sleep(_STALL_S)
        self.close_connection |= is_cut or fault == "long"


def configure(port: int, kind: str = "", skip: int = 0, times: int = -1) -> int:
    """Set the faults to come; return how many there were since the last call."""
    query = f"kind={quote(kind)}&skip={skip}&times={times}"
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/:set?{query}", timeout=10) as answer:
        return int(answer.read())


@contextmanager
def run_server(root: Path) -> Iterator[int]:
    """Run the server in its own process; yields its port."""
    command = [sys.executable, "-m", __name__, str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


if __name__ == "__main__":
    server = Server(Path(sys.argv[1]))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()
    os._exit(0)
