"""What runs in a host: `python -m labkit.peers.serve DESCRIPTOR FOLDER`, started by `labkit.peers.host.Host`."""

import gc
import os
import pickle
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from labkit.core import Lazy, keep_freed_memory
from labkit.peers.peer import Peer, Work
from labkit.peers.run import PeerRun

_MAX_ERROR_LENGTH = 200


def serve(pipe: Connection) -> None:
    """Answer commands until the pipe is closed. Each answer is ("value", ...) or ("error", line)."""
    from labkit.measure import PeakMemory

    keep_freed_memory()  # the same for all peers, whatever they have imported
    sys.path[:] = pipe.recv()
    pickled = pipe.recv_bytes()
    peer_and_work = Lazy(lambda: pickle.loads(pickled))  # noqa: S301 - from `Host`, which started this process
    with PeakMemory() as memory, suppress(OSError, EOFError):  # of the pipe
        while command := pipe.recv():
            try:
                for value in _COMMANDS[command](*peer_and_work(), memory):
                    pipe.send(("value", value))
            except Exception as error:
                pipe.send(("error", one_line(error)))


def one_line(error: BaseException) -> str:
    """An exception's message in one line: of a group the first's, of a worker's the last line of its traceback."""
    while isinstance(error, BaseExceptionGroup):  # as SPDL raises, and its message says only how many
        error = error.exceptions[0]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    if "Original Traceback" in str(error):
        return lines[-1][:_MAX_ERROR_LENGTH]
    kind = "" if type(error).__name__ == "PeerError" else f"{type(error).__name__}: "
    return f"{kind}{lines[0]}"[:_MAX_ERROR_LENGTH]


def _prepare(peer: Peer, work: Work, memory: Any) -> Iterator[None]:
    if peer.prepare:
        peer.prepare(work)
    yield None


def _check(peer: Peer, work: Work, memory: Any) -> Iterator[dict]:
    from labkit.peers.check import check_peer

    yield check_peer(peer, work)


def _epoch(peer: Peer, work: Work, memory: Any) -> Iterator[Any]:
    """Yields None when ready, then the number of images in the first batch and in the rest, then the costs of all."""
    from labkit.measure import core_time, page_cache_state, tree_usage

    gc.collect()
    memory.begin()
    before, cores_before, run = tree_usage(), core_time(), PeerRun(peer, work)
    run.start()
    yield None
    n_first = run.take_first()
    if not n_first:
        raise ValueError("gives no batch")
    yield n_first
    memory.now()
    run.take_rest()
    yield run.n_images - n_first
    after, cores, peak_mem_mb = tree_usage(), core_time() - cores_before, memory.end()
    yield {
        **run.columns(after.cpu_s - before.cpu_s, cores),
        "peak_mem_mb": peak_mem_mb,
        "page_cache": page_cache_state(before.read_bytes, after.read_bytes),
    }


def _gil(peer: Peer, work: Work, memory: Any) -> Iterator[float]:
    from labkit.measure import gil_us_per_image

    # With one thread: one that holds the lock and waits for a core, as among several, would count as holding it.
    yield gil_us_per_image(partial(peer.loader, replace(work, num_workers=1)))


_COMMANDS: dict[str, Callable[..., Iterator[Any]]] = {
    "prepare": _prepare, "check": _check, "epoch": _epoch, "gil": _gil,
}  # fmt: skip


if __name__ == "__main__":
    os.environ["TMPDIR"] = tempfile.tempdir = sys.argv[2]
    serve(Connection(int(sys.argv[1])))
    shutil.rmtree(sys.argv[2], ignore_errors=True)  # the host does it too, but may have been killed
