"""A server that misbehaves on request. It serves a folder over HTTP, and the same folder as an S3 bucket."""

import multiprocessing
import os
import re
import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit

from tests.serving import Quiet

KINDS = ("500", "503", "stall", "stall body", "cut", "long", "short", "reset", "no range", "other range")
BUCKET = "bucket"
_STALL_S = 5.0
_LISTED = (
    '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>bucket</Name>'
    "<Prefix>{}</Prefix><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>{}</ListBucketResult>"
)
_ROW = (
    "<Contents><Key>{}</Key><LastModified>2025-01-01T00:00:00.000Z</LastModified><ETag>&quot;1&quot;</ETag>"
    "<Size>{}</Size><StorageClass>STANDARD</StorageClass></Contents>"
)


class BadServer(ThreadingHTTPServer):
    """Its faults are set, in any fork of the process that made it, by `spoil`."""

    daemon_threads = True

    def __init__(self, root: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.root, self.port = root, self.server_port
        self._due = multiprocessing.get_context("fork").Array("i", 4)  # kind, answers to skip, times, hits

    def spoil(self, kind: str = "", skip: int = 0, times: int = -1) -> int:
        """Spoil so many answers (-1: all) after the next `skip`; returns how many were spoilt since the last call."""
        with self._due:
            hits = self._due[3]
            self._due[:] = [KINDS.index(kind) if kind else -1, skip, times, 0]
        return hits

    def next_fault(self) -> str:
        """The fault of the next answer; "" for none."""
        with self._due:
            kind, skip, times, hits = self._due
            if skip > 0 or kind < 0 or not times:
                self._due[1] = max(0, skip - 1)
                return ""
            self._due[2:] = [times - 1, hits + 1]
            return KINDS[kind]

    def handle_error(self, request, client_address):
        pass  # clients hang up


class Handler(Quiet, BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        parts = urlsplit(self.path)
        path, root = unquote(parts.path).strip("/"), self.server.root
        place = root / path.removeprefix(f"{BUCKET}/")
        if path == BUCKET:
            prefix = parse_qs(parts.query).get("prefix", [""])[0]
            files = {file.relative_to(root).as_posix(): file for file in sorted(root.rglob("*")) if file.is_file()}
            rows = [_ROW.format(name, file.stat().st_size) for name, file in files.items() if name.startswith(prefix)]
            self.answer(200, _LISTED.format(prefix, "".join(rows)).encode(), {"Content-Type": "application/xml"})
        elif place.is_file():
            self.send_file(place)
        elif place.is_dir() and not path.startswith(BUCKET):
            names = sorted(entry.name + "/" * entry.is_dir() for entry in place.iterdir())
            links = "".join(f'<a href="{quote(name)}">x</a>' for name in names)
            self.answer(200, links.encode(), {"Content-Type": "text/html"})
        else:
            self.answer(404, b"", {})

    do_HEAD = do_GET

    def send_file(self, place: Path) -> None:
        data = place.read_bytes()
        headers = {"ETag": '"1"', "Last-Modified": formatdate(place.stat().st_mtime, usegmt=True)}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not asked:
            return self.answer(200, data, headers)
        first, last = int(asked[1]), int(asked[2] or len(data))
        part = data[first : last + 1]
        if not part:
            return self.answer(416, b"", {})
        headers["Content-Range"] = f"bytes {first}-{first + len(part) - 1}/{len(data)}"
        return self.answer(206, part, headers, whole=data, first=first)

    def answer(self, status: int, data: bytes, headers: dict, whole: bytes | None = None, first: int = 0) -> None:
        """Send an answer with the fault that is due. whole, first: the file of which `data` is a range, from there."""
        fault = self.server.next_fault()
        is_cut = fault in ("cut", "stall body")
        if fault == "stall":
            time.sleep(_STALL_S)
            self.close_connection = True
            return
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(self.connection.detach())  # without detach, the connection would be shut down in order
            raise ConnectionResetError
        if fault in ("500", "503"):
            status, data, headers = int(fault), b"", {"Retry-After": "0"}
        elif fault == "no range" and whole is not None:
            status, data = 200, whole
            del headers["Content-Range"]
        elif fault == "short":
            data = data[: len(data) // 2]
        elif fault == "other range" and whole is not None and len(data) > 1:  # fewer bytes than were asked for
            data = data[: len(data) // 2]
            headers["Content-Range"] = f"bytes {first}-{first + len(data) - 1}/{len(whole)}"
        self.send_response(status)
        length = len(data) + (1000 if fault == "long" else 0)
        for name, value in {**headers, "Content-Length": str(length), "Accept-Ranges": "bytes"}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if is_cut else data)
            self.wfile.flush()
        if fault == "stall body":
            time.sleep(_STALL_S)
        self.close_connection |= is_cut or fault == "long"


def _serve(server: BadServer) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server.serve_forever(0.02)


@contextmanager
def run_server(root: Path) -> Iterator[BadServer]:
    """The server of a folder, in a process of its own."""
    server = BadServer(root)
    server.spoil()
    process = multiprocessing.get_context("fork").Process(target=_serve, args=[server], daemon=True)
    process.start()
    try:
        yield server
    finally:
        process.kill()
        process.join()
        server.server_close()
