"""What runs in a host: `python -m labkit.peers.serve DESCRIPTOR FOLDER`, started by `labkit.peers.host.Host`."""

import gc
import os
import pickle
import shutil
import sys
import tempfile
from collections.abc import Iterator
from itertools import chain
from multiprocessing.connection import Connection
from typing import Any

from labkit.peers.peer import EPOCHS_A_RUN, Peer, Work

_LONGEST = 200  # characters of an error's line


def serve(pipe: Connection) -> None:
    """Answer commands until the pipe is closed: each answer is ("value", ...) or ("error", line)."""
    from labkit.measure import PeakMemory

    sys.path[:] = pipe.recv()
    try:
        peer, work = pickle.loads(pipe.recv_bytes())  # noqa: S301 - from `Host`, which started this process
    except Exception as error:
        _answer_all(pipe, ("error", one_line(error)))
        return
    with PeakMemory() as memory:
        while (command := _next_command(pipe)) is not None:
            try:
                for value in _COMMANDS[command](peer, work, memory):
                    pipe.send(("value", value))
            except OSError as error:
                if pipe.closed or isinstance(error, BrokenPipeError):
                    return
                pipe.send(("error", one_line(error)))
            except Exception as error:
                pipe.send(("error", one_line(error)))


def one_line(error: BaseException) -> str:
    """What an exception says, in a line: of a worker's, the last one of its traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    if "Original Traceback" in str(error):
        return lines[-1][:_LONGEST]
    kind = "" if type(error).__name__ == "PeerError" else f"{type(error).__name__}: "
    return f"{kind}{lines[0]}"[:_LONGEST]


def _next_command(pipe: Connection) -> str | None:
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return None


def _answer_all(pipe: Connection, answer: tuple[str, Any]) -> None:
    while _next_command(pipe) is not None:
        pipe.send(answer)


def _prepare(peer: Peer, work: Work, memory: Any) -> Iterator[None]:
    if peer.prepare:
        peer.prepare(work)
    yield None


def _check(peer: Peer, work: Work, memory: Any) -> Iterator[dict]:
    from labkit.peers.check import PeerError, check_peer

    try:
        yield check_peer(peer, work)
    except PeerError as error:
        raise PeerError(str(error)) from None


def _epochs(peer: Peer, work: Work) -> Iterator[Any]:
    """Batches of a run; the first epoch starts at once, so that starting is not in the time."""
    first = iter(peer.loader(work))
    further = (peer.loader(work) for _ in range(EPOCHS_A_RUN[peer.source] - 1))
    return chain(first, chain.from_iterable(further))


def _epoch(peer: Peer, work: Work, memory: Any) -> Iterator[Any]:
    """At once when ready, then the first batch's images, the images of the rest, and the costs of all."""
    from labkit.measure import count_images, page_cache_state, synchronize, tree_usage

    gc.collect()
    memory.begin()
    before = tree_usage()
    batches = _epochs(peer, work)
    yield None
    first = next(batches, None)
    if first is None:
        raise ValueError("gives no batch")
    synchronize()
    yield count_images(first)
    del first
    memory.now()
    n_rest = sum(count_images(batch) for batch in batches)
    synchronize()
    yield n_rest
    after, peak_mem_mb = tree_usage(), memory.end()
    yield {
        "cpu_s": after.cpu_s - before.cpu_s,
        "peak_mem_mb": peak_mem_mb,
        "page_cache": page_cache_state(before.read_bytes, after.read_bytes),
    }


_COMMANDS = {"prepare": _prepare, "check": _check, "epoch": _epoch}


if __name__ == "__main__":
    os.environ["TMPDIR"] = tempfile.tempdir = sys.argv[2]
    serve(Connection(int(sys.argv[1])))
    shutil.rmtree(sys.argv[2], ignore_errors=True)  # here, too: who made it may have been killed
