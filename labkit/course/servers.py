"""Servers on this machine for experiments and tests: a folder over HTTP, and an S3 service; what storage takes.

Each runs in a process of its own, so that it does not share a Python interpreter with the loader that reads from it.
They still share the cores.
"""

import asyncio
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from html import escape
from importlib.util import find_spec
from typing import Any, NamedTuple
from urllib.parse import quote, unquote
from uuid import uuid4
from xml.etree import ElementTree

from labkit.errors import MissingFileError, MissingLibraryError, StorageError
from labkit.util.files import key_from_name, path_from_key
from labkit.util.machine import install_command


class Disk(NamedTuple):
    """A kind of storage: what finding another place costs, and what one reader gets, in 1e6 bytes."""

    name: str
    bandwidth_mb_per_s: float
    seek_ms: float = 0.0
    latency_ms: float = 0.0


#: By name. Objects in S3 take 20 to 200 ms to the first byte, by AWS's own figures; here is the geometric mean.
#: https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance.html
DISKS = {
    "hdd": Disk("hard disk", 180.0, seek_ms=8.0),
    "network": Disk("network storage", 1000.0, latency_ms=1.0),
    "object": Disk("object storage", 90.0, latency_ms=63),
}


@contextmanager
def serve_folder(root: str | os.PathLike, *, latency_ms: float = 0.0, bandwidth_mb_per_s: float = 0.0) -> Iterator[str]:
    """Serve the files of a folder on the loopback interface, with listings and range requests.

    Args:
        root: The folder.
        latency_ms: Wait before each answer, to imitate a distant server.
        bandwidth_mb_per_s: What each connection gets, in 1e6 bytes, as object storage limits it. Default: no limit.

    Yields:
        The URL, `http://127.0.0.1:<port>/`. The server ends with the block.

    Raises:
        FileNotFoundError: `root` is not a folder.

    Taught in: notebooks/08_shard_formats.ipynb
    """
    if not os.path.isdir(root):
        raise MissingFileError(f"{root} is not a folder")
    with _server_process("folder", os.path.abspath(root), str(latency_ms), str(bandwidth_mb_per_s)) as port:
        yield f"http://127.0.0.1:{port}/"


@contextmanager
def serve_s3(buckets: Mapping[str, str | os.PathLike], *, latency_ms: float = 0.0) -> Iterator[dict[str, Any]]:
    """Serve folders as the buckets of an S3 service on the loopback interface.

    It runs in a process of its own, and accepts any credentials. Objects can be listed, read whole or in ranges,
    written and removed; the folders themselves stay as they are.

    Args:
        buckets: Name of each bucket, and the folder whose files are its objects.
        latency_ms: Wait before each answer to a GET or HEAD, to imitate a distant server.

    Yields:
        `storage_options` for `ObjectStore`, `TarStore` and `read_shards`. The server, and what was written to it, end
        with the block.

    Raises:
        FileNotFoundError: a folder is not there.
        ImportError: s3fs, which those three need, is missing; names the extra.

    >>> with course.serve_s3({"bucket": "photos"}, latency_ms=30) as options:  # doctest: +SKIP
    ...     store = lk.ObjectStore("s3://bucket", storage_options=options)

    Taught in: notebooks/08_shard_formats.ipynb
    """
    if find_spec("s3fs") is None:
        raise MissingLibraryError(f"s3fs is missing: {install_command('s3')}")
    for folder in buckets.values():
        if not os.path.isdir(folder):
            raise MissingFileError(f"{folder} is not a folder")
    folders = {name: os.path.abspath(folder) for name, folder in buckets.items()}
    with (
        tempfile.TemporaryDirectory() as written,
        _server_process("s3", str(latency_ms), json.dumps(folders), written) as port,
    ):
        yield {"key": "labkit", "secret": "labkit", "endpoint_url": f"http://127.0.0.1:{port}"}


@contextmanager
def _server_process(*arguments: str) -> Iterator[int]:
    """Run this module as a server in another process, and yield its port.

    The server also ends when its standard input does: then this process was killed.
    """
    command = [sys.executable, "-m", "labkit.course.servers", *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        start_new_session=True,  # Ctrl-C goes to the caller, who then ends the server
    ) as process:  # fmt: skip
        try:
            port = process.stdout.readline() if process.stdout else ""
            if not port:
                raise StorageError(f"the {arguments[0]} server did not start; to see why, run: {shlex.join(command)}")
            yield int(port)
        finally:
            process.kill()  # closing its input may not end it: a forked worker may hold a copy of the pipe


def _serve_folder(root: str, latency_ms: str, bandwidth_mb_per_s: str) -> None:
    from aiohttp import web

    async def answer(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(float(latency_ms) / 1e3)
        key = unquote(request.rel_url.raw_path, errors="surrogateescape").lstrip("/")
        path = os.path.join(root, path_from_key(key))
        if ".." in key.split("/") or not os.path.exists(path):
            return web.Response(status=404)
        if not os.path.isdir(path):
            bytes_per_s = float(bandwidth_mb_per_s) * 1e6
            return await _sent_slowly(request, path, bytes_per_s) if bytes_per_s else web.FileResponse(path)
        names = sorted(name + "/" * os.path.isdir(os.path.join(path, name)) for name in os.listdir(path))
        links = (quote(key_from_name(name), errors="surrogateescape") for name in names)
        items = "".join(f'<li><a href="{link}">file</a></li>' for link in links)
        return web.Response(text=f"<ul>{items}</ul>", content_type="text/html")

    _run(answer)


_PIECE_BYTES = 1 << 16


async def _sent_slowly(request: Any, path: str, bytes_per_s: float) -> Any:
    """The file, or the range of it that is asked for, at no more bytes a second than this."""
    from aiohttp import web

    size, asked, clock = os.path.getsize(path), request.http_range, asyncio.get_running_loop().time
    is_part = asked.start is not None
    first, end, _ = asked.indices(size)
    response = web.StreamResponse(status=206 if is_part else 200, headers={"Accept-Ranges": "bytes"})
    if is_part:
        response.headers["Content-Range"] = f"bytes {first}-{end - 1}/{size}"
    response.content_length = end - first
    await response.prepare(request)
    if request.method == "HEAD":
        return response
    begun_s = clock()
    with open(path, "rb") as file:
        file.seek(first)
        for at in range(first, end, _PIECE_BYTES):
            piece = file.read(min(_PIECE_BYTES, end - at))
            # the last byte of a piece has come when the connection could have brought it
            await asyncio.sleep(begun_s + (at + len(piece) - first) / bytes_per_s - clock())
            await response.write(piece)
    return response


_LIST_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"


def _serve_s3(latency_ms: str, folders: str, written: str) -> None:
    from aiohttp import web

    buckets = {name: _files_in(folder) for name, folder in json.loads(folders).items()}

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.method in ("GET", "HEAD"):
            await asyncio.sleep(float(latency_ms) / 1e3)
        bucket, _, key = unquote(request.rel_url.raw_path)[1:].partition("/")
        if bucket not in buckets:
            return _s3_error(404, "NoSuchBucket", "The specified bucket does not exist")
        objects = buckets[bucket]
        if request.method == "PUT":
            objects[key] = path = os.path.join(written, uuid4().hex)
            with open(path, "wb") as file:
                file.write(await request.read())
            return web.Response(headers={"ETag": f'"{uuid4().hex}"'})
        if request.method == "DELETE":
            objects.pop(key, None)
            return web.Response(status=204)
        if request.method == "POST" and "delete" in request.query:
            for of_object in ElementTree.fromstring(await request.read()).iter():  # noqa: S314 - of this machine's client
                if of_object.tag.endswith("Key"):
                    objects.pop(of_object.text or "", None)
            return web.Response(text="<DeleteResult/>", content_type="application/xml")
        if request.method not in ("GET", "HEAD"):
            return _s3_error(501, "NotImplemented", "This server takes whole objects, and not parts of them.")
        if not key:
            return web.Response(text=_s3_list(bucket, objects, request.query), content_type="application/xml")
        if key not in objects:
            return _s3_error(404, "NoSuchKey", "The specified key does not exist.")
        return web.FileResponse(objects[key])  # or the range that is asked for

    _run(answer)


def _files_in(folder: str) -> dict[str, str]:
    """Key and path of each file in a folder, as an upload of the folder names them."""
    paths = [os.path.join(place, name) for place, _, names in os.walk(folder) for name in names]
    return {os.path.relpath(path, folder).replace(os.sep, "/"): path for path in paths}


def _s3_error(status: int, code: str, message: str) -> Any:
    from aiohttp import web

    text = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return web.Response(status=status, text=text, content_type="application/xml")


def _s3_list(bucket: str, objects: Mapping[str, str], query: Mapping[str, str]) -> str:
    """What ListObjectsV2 answers: a page of the keys that begin with a prefix, or with a delimiter of its folders."""
    prefix, delimiter, limit = query.get("prefix", ""), query.get("delimiter", ""), int(query.get("max-keys", 1000))
    last = query.get("continuation-token") or query.get("start-after", "")
    names = set()
    for key in objects:
        if key.startswith(prefix):
            head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key[len(prefix) :], "", "")
            names.add(prefix + head + found)
    rest = sorted(name for name in names if name > last)
    page, encode = rest[:limit], quote if query.get("encoding-type") == "url" else escape
    rows = [_s3_row(encode(name), objects.get(name)) for name in page]
    more = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if len(rest) > limit else ""
    encoding = "<EncodingType>url</EncodingType>" * (encode is quote)
    return (
        f'<ListBucketResult xmlns="{_LIST_NAMESPACE}"><Name>{bucket}</Name><Prefix>{encode(prefix)}</Prefix>'
        f"<KeyCount>{len(page)}</KeyCount><MaxKeys>{limit}</MaxKeys>{encoding}"
        f"<IsTruncated>{str(bool(more)).lower()}</IsTruncated>{more}{''.join(rows)}</ListBucketResult>"
    )


def _s3_row(name: str, path: str | None) -> str:
    if path is None:
        return f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>"
    about = os.stat(path)
    changed = datetime.fromtimestamp(about.st_mtime, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    etag = f"{about.st_mtime_ns:x}-{about.st_size:x}"  # as aiohttp answers for the file
    return (
        f"<Contents><Key>{name}</Key><LastModified>{changed}</LastModified><ETag>&quot;{etag}&quot;</ETag>"
        f"<Size>{about.st_size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
    )


def _run(answer: Callable[..., Any]) -> None:
    from aiohttp import web

    app = web.Application(client_max_size=2**32)
    app.router.add_route("*", r"/{path:[\s\S]*}", answer)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        web.run_app(app, sock=listener, access_log=None, print=None)


def _exit_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


_SERVERS: dict[str, Callable[..., None]] = {"folder": _serve_folder, "s3": _serve_s3}

if __name__ == "__main__":
    threading.Thread(target=_exit_with_parent).start()
    _SERVERS[sys.argv[1]](*sys.argv[2:])
