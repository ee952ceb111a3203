"""Servers on this machine for experiments and tests: a folder over HTTP, an S3 of one's own.

Each is a process of its own, so that it does not share a Python interpreter with the loader that it feeds; it shares
the cores all the same.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, unquote

from labkit.core import key_from_name, path_from_key


@contextmanager
def serve_folder(root: str | os.PathLike, *, latency_ms: float = 0.0) -> Iterator[str]:
    """Serve the files of a folder on the loopback interface, with listings and range requests.

    Args:
        root: The folder.
        latency_ms: Wait before each answer, as a distant server's answers have.

    Yields:
        The address, `http://127.0.0.1:<port>/`. The server ends with the block.

    Raises:
        FileNotFoundError: `root` is not a folder.

    Taught in: notebooks/08_shard_formats.ipynb
    """
    if not os.path.isdir(root):
        raise FileNotFoundError(f"{root} is not a folder")
    with _child("folder", os.fspath(os.path.abspath(root)), str(latency_ms)) as port:
        yield f"http://127.0.0.1:{port}/"


@contextmanager
def serve_s3(buckets: Mapping[str, str | os.PathLike]) -> Iterator[dict[str, Any]]:
    """An empty S3 server (moto's) on the loopback interface, filled with folders.

    Args:
        buckets: Name of each bucket, and the folder whose files go into it.

    Yields:
        `storage_options` for `ObjectStore`, `TarStore` and `read_shards`. The server and its contents end with the
        block.

    Raises:
        ImportError: moto or s3fs is missing; names the extra.

    Taught in: notebooks/08_shard_formats.ipynb
    """
    try:
        import moto.server
        import s3fs
    except ImportError as error:
        raise ImportError(f'{error.name} is missing: python -m pip install -e ".[test]"') from error
    del moto
    with _child("s3") as port:
        options = {"key": "labkit", "secret": "labkit", "endpoint_url": f"http://127.0.0.1:{port}"}
        filesystem = s3fs.S3FileSystem(**options)
        for bucket, folder in buckets.items():
            filesystem.mkdir(bucket)
            filesystem.put(os.fspath(folder).rstrip("/") + "/", f"{bucket}/", recursive=True)
        yield options


@contextmanager
def _child(*arguments: str) -> Iterator[int]:
    """A server of this module in a process of its own: the port that it says.

    It also ends by itself when its input does, which is when this process was killed.
    """
    command = [sys.executable, "-m", "labkit.data.stores.local_servers", *arguments]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        start_new_session=True,  # Ctrl-C is for the caller, who then ends the server in order
    )  # fmt: skip
    try:
        said = process.stdout.readline()
        if not said:
            raise OSError(f"the {arguments[0]} server did not start: {' '.join(command)} shows why")
        yield int(said)
    finally:
        process.kill()  # it holds nothing worth an orderly end, and a forked worker may keep its input open
        process.wait()
        process.stdin.close()
        process.stdout.close()


def _serve_folder(root: str, latency_ms: str) -> None:
    from aiohttp import web

    @web.middleware
    async def late(request, handler):
        await asyncio.sleep(float(latency_ms) / 1e3)
        return await handler(request)

    async def answer(request):
        path = unquote(request.rel_url.raw_path, errors="surrogateescape").lstrip("/")
        place = os.path.join(root, path_from_key(path))
        if ".." in path.split("/") or not os.path.exists(place):
            return web.Response(status=404)
        if not os.path.isdir(place):
            return web.FileResponse(place)
        names = sorted(name + "/" * os.path.isdir(os.path.join(place, name)) for name in os.listdir(place))
        links = "".join(
            f'<li><a href="{quote(key_from_name(name), errors="surrogateescape")}">file</a></li>' for name in names
        )
        return web.Response(text=f"<ul>{links}</ul>", content_type="text/html")

    async def run():
        app = web.Application(middlewares=[late] if float(latency_ms) else [])
        app.router.add_get(r"/{path:[\s\S]*}", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.to_thread(sys.stdin.read)

    asyncio.run(run())


def _serve_s3() -> None:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    print(server.get_host_and_port()[1], flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    {"folder": _serve_folder, "s3": _serve_s3}[sys.argv[1]](*sys.argv[2:])
