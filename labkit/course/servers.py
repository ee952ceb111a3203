"""Servers on this machine for experiments and tests: a folder over HTTP, and an S3 service.

Each runs in a process of its own, so that it does not share a Python interpreter with the loader that reads from it.
They still share the cores.
"""

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, unquote

from labkit.errors import MissingFileError, MissingLibraryError, StorageError
from labkit.util.files import key_from_name, path_from_key
from labkit.util.machine import install_command


@contextmanager
def serve_folder(root: str | os.PathLike, *, latency_ms: float = 0.0) -> Iterator[str]:
    """Serve the files of a folder on the loopback interface, with listings and range requests.

    Args:
        root: The folder.
        latency_ms: Wait before each answer, to imitate a distant server.

    Yields:
        The URL, `http://127.0.0.1:<port>/`. The server ends with the block.

    Raises:
        FileNotFoundError: `root` is not a folder.

    Taught in: notebooks/08_shard_formats.ipynb
    """
    if not os.path.isdir(root):
        raise MissingFileError(f"{root} is not a folder")
    with _server_process("folder", os.path.abspath(root), str(latency_ms)) as port:
        yield f"http://127.0.0.1:{port}/"


@contextmanager
def serve_s3(buckets: Mapping[str, str | os.PathLike], *, latency_ms: float = 0.0) -> Iterator[dict[str, Any]]:
    """An S3 server (moto's) on the loopback interface, filled from folders.

    Args:
        buckets: Name of each bucket, and the folder whose files go into it.
        latency_ms: Wait before each answer to a GET or HEAD, to imitate a distant server.

    Yields:
        `storage_options` for `ObjectStore`, `TarStore` and `read_shards`. The server and its contents end with the
        block.

    Raises:
        ImportError: moto or s3fs is missing; names the extra.

    Taught in: notebooks/08_shard_formats.ipynb
    """
    try:
        import moto.server  # noqa: F401 - for the server process
        import s3fs
    except ImportError as error:
        raise MissingLibraryError(f"{error.name} is missing: {install_command('test')}") from error
    with _server_process("s3", str(latency_ms)) as port:
        options = {"key": "labkit", "secret": "labkit", "endpoint_url": f"http://127.0.0.1:{port}"}
        filesystem = s3fs.S3FileSystem(**options)
        for bucket, folder in buckets.items():
            filesystem.mkdir(bucket)
            filesystem.put(os.fspath(folder).rstrip("/") + "/", f"{bucket}/", recursive=True)
        yield options


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
                raise StorageError(f"the {arguments[0]} server did not start; to see why, run: {' '.join(command)}")
            yield int(port)
        finally:
            process.kill()  # closing its input may not end it: a forked worker may hold a copy of the pipe


def _serve_folder(root: str, latency_ms: str) -> None:
    from aiohttp import web

    async def answer(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(float(latency_ms) / 1e3)
        key = unquote(request.rel_url.raw_path, errors="surrogateescape").lstrip("/")
        path = os.path.join(root, path_from_key(key))
        if ".." in key.split("/") or not os.path.exists(path):
            return web.Response(status=404)
        if not os.path.isdir(path):
            return web.FileResponse(path)
        names = sorted(name + "/" * os.path.isdir(os.path.join(path, name)) for name in os.listdir(path))
        links = (quote(key_from_name(name), errors="surrogateescape") for name in names)
        items = "".join(f'<li><a href="{link}">file</a></li>' for link in links)
        return web.Response(text=f"<ul>{items}</ul>", content_type="text/html")

    app = web.Application()
    app.router.add_get(r"/{path:[\s\S]*}", answer)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        web.run_app(app, sock=listener, access_log=None, print=None)


def _serve_s3(latency_ms: str) -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    moto, turn = DomainDispatcherApplication(create_backend_app), threading.Lock()

    def answer(request: Any, start: Any) -> Any:
        if request["REQUEST_METHOD"] in ("GET", "HEAD"):
            time.sleep(float(latency_ms) / 1e3)  # in a thread of its own, of which there are as many as connections
        with turn:  # 64 threads that contend for Python's lock would take twice as long as one after the other
            return moto(request, start)

    server = make_server("127.0.0.1", 0, answer, threaded=True)
    print(server.port, flush=True)
    server.serve_forever()


def _exit_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


_SERVERS: dict[str, Callable[..., None]] = {"folder": _serve_folder, "s3": _serve_s3}

if __name__ == "__main__":
    threading.Thread(target=_exit_with_parent).start()
    _SERVERS[sys.argv[1]](*sys.argv[2:])
