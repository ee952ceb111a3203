"""A process of its own for each loader of a comparison: `python -m labkit.peers.host DESCRIPTOR FOLDER`.

A loader that crashes, hangs or changes global settings cannot harm the others, and its memory and CPU time do not
include workers that another loader keeps.
"""

import gc
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any

from labkit.errors import ArgumentError, HostError
from labkit.measure.usage import excluded_pids
from labkit.peers.peer import Peer, Work
from labkit.peers.run import PeerRun
from labkit.util.process import keep_freed_memory

_MAX_ERROR_LENGTH = 200


def serve(pipe: Connection) -> None:
    """Answer commands until the pipe is closed. Each answer is ("value", ...) or ("error", line)."""
    from labkit.measure.usage import PeakMemory

    keep_freed_memory()  # the same for all peers, whatever they have imported
    sys.path[:] = pipe.recv()
    pickled = pipe.recv_bytes()
    with PeakMemory() as memory, suppress(OSError, EOFError):  # of the pipe
        loaded: tuple[Peer, Work] | None = None
        while command := pipe.recv():
            try:
                loaded = loaded or pickle.loads(pickled)  # noqa: S301 - from `Host`, which started this process
                peer, work = loaded
                for value in _answers(command, peer, work, memory):
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


def _answers(command: str, peer: Peer, work: Work, memory: Any) -> Iterator[Any]:
    """What a command yields: `prepare` None, `check` what `check_peer` found, `epoch`: below."""
    if command == "prepare":
        if peer.prepare:
            peer.prepare(work)
        yield None
    elif command == "check":
        from labkit.peers.check import check_peer

        yield check_peer(peer, work)
    else:
        yield from _epoch(peer, work, memory)


def _epoch(peer: Peer, work: Work, memory: Any) -> Iterator[Any]:
    """Yields None when ready, then the number of images in the first batch and in the rest, then the costs of all."""
    from labkit.measure.steady import page_cache_state
    from labkit.measure.usage import core_time, tree_usage

    gc.collect()
    memory.begin()
    before, cores_before, run = tree_usage(), core_time(), PeerRun(peer, work)
    run.start()
    yield None
    n_first = run.take_first()
    if not n_first:
        raise ArgumentError("gives no batch")
    yield n_first
    memory.now()
    run.take_rest()
    yield run.timing.n_images - n_first
    after, cores, peak_mem_mb = tree_usage(), core_time() - cores_before, memory.end()
    yield {
        **run.timing.columns(after.cpu_s - before.cpu_s, cores),
        "peak_mem_mb": peak_mem_mb,
        "page_cache": page_cache_state(before.read_bytes, after.read_bytes),
    }


if __name__ == "__main__":
    os.environ["TMPDIR"] = tempfile.tempdir = sys.argv[2]
    serve(Connection(int(sys.argv[1])))
    shutil.rmtree(sys.argv[2], ignore_errors=True)  # the host does it too, but may have been killed


TIMEOUT_S = 900.0  # for one answer: preparing a format, or a whole epoch
_EXIT_TIMEOUT_S = 10.0


class Host(AbstractContextManager):
    """A loader in its own process. A context manager; `ask` takes a command of `labkit.peers.host`."""

    def __init__(self, peer: Peer, work: Work, *, timeout_s: float = TIMEOUT_S):
        import cloudpickle  # a loader may be defined in a notebook

        self._timeout_s = timeout_s
        self._pipe, child_pipe = Pipe()
        self._folder = tempfile.mkdtemp(prefix="labkit-peer-")  # for what killed workers leave behind
        with child_pipe:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "labkit.peers.host", str(child_pipe.fileno()), self._folder],
                pass_fds=[child_pipe.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, start_new_session=True,  # Ctrl-C comes to us, and we close the host
            )  # fmt: skip
        excluded_pids.add(self._process.pid)
        with suppress(OSError):  # the process died: `answer` reports it
            self._pipe.send(sys.path)
            self._pipe.send_bytes(cloudpickle.dumps((peer, work)))

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def ask(self, command: str) -> Any:
        """Send a command and wait for its answer."""
        with suppress(OSError):  # the process died: `answer` reports it
            self._pipe.send(command)
        return self.answer()

    def answer(self) -> Any:
        """Wait for the next answer.

        Raises:
            HostError: the command raised an exception, the process crashed, or it did not answer in time.
        """
        deadline = time.monotonic() + self._timeout_s
        try:
            while not self._pipe.poll(1):
                if self._process.poll() is not None:  # its orphans may hold the pipe open
                    raise EOFError
                if time.monotonic() > deadline:
                    self._process.kill()
                    raise HostError(f"gave no answer for {self._timeout_s:.0f} s")
            status, value = self._pipe.recv()
        except (EOFError, OSError):
            code = self._process.wait(_EXIT_TIMEOUT_S)
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            raise HostError(f"its process ended {how}") from None
        if status == "error":
            raise HostError(value)
        return value

    def hang_up(self) -> None:
        """Let the process end, without waiting for it."""
        self._pipe.close()

    def close(self) -> None:
        """End the process and all that it started."""
        self.hang_up()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_TIMEOUT_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # kills orphaned workers, too
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
        excluded_pids.discard(self._process.pid)


class HostedLoader:
    """A run of a hosted loader, for `compare`. Iterating yields the number of images in the first batch and the rest.

    Attributes:
        images_per_s, steady_s, n_steady_batches, n_steady_images, is_steady, cpu_s, steal_s, others_cpu_s, peak_mem_mb,
            page_cache: Of the run just read, see `labkit.peers.run`. Costs are those of the host's own process tree.
    """

    def __init__(self, host: Host, work: Work):
        self.batch_size, self.num_workers = work.batch_size, work.num_workers
        self._host = host

    def __iter__(self) -> Iterator[int]:
        self._host.ask("epoch")
        return self._count_images()

    def _count_images(self) -> Iterator[int]:
        yield self._host.answer()
        n_rest = self._host.answer()
        vars(self).update(self._host.answer())
        if n_rest:
            yield n_rest
