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
from labkit.measure.usage import PeakMemory, core_time, excluded_pids, tree_usage
from labkit.peers.peer import Peer, Work
from labkit.peers.run import PeerRun
from labkit.util.process import keep_freed_memory

_MAX_ERROR_LENGTH = 200


def serve(pipe: Connection) -> None:
    """Call what is asked of a `_Served` until the pipe is closed. Answers are ("value", ...) or ("error", line)."""
    keep_freed_memory()  # the same for all peers, whatever they have imported
    sys.path[:] = pipe.recv()
    pickled = pipe.recv_bytes()
    with PeakMemory() as memory, suppress(OSError, EOFError):  # of the pipe
        served: _Served | None = None
        while command := pipe.recv():
            try:
                if served is None:
                    peer, work = pickle.loads(pickled)  # noqa: S301 - from `Host`, which started this process
                    served = _Served(peer, work, memory)
                pipe.send(("value", getattr(served, command)()))
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


class _Served:
    """A loader in its process, and what may be asked of it. A run is `start`, `take_first` and `take_rest`."""

    def __init__(self, peer: Peer, work: Work, memory: Any):
        self._peer, self._work, self._memory = peer, work, memory

    def prepare(self) -> None:
        if self._peer.prepare:
            self._peer.prepare(self._work)

    def check(self) -> dict[str, float]:
        from labkit.peers.check import check_peer

        return check_peer(self._peer, self._work)

    def start(self) -> None:
        gc.collect()
        self._memory.begin()
        self._usage, self._cores, self._run = tree_usage(), core_time(), PeerRun(self._peer, self._work)
        self._run.start()

    def take_first(self) -> int:
        """Images of the first batch."""
        self._n_first = self._run.take_first()
        if not self._n_first:
            raise ArgumentError("gives no batch")
        return self._n_first

    def take_rest(self) -> tuple[int, dict[str, Any]]:
        """Images of all other batches, and the figures of the run."""
        from labkit.measure.steady import page_cache_state

        self._memory.now()
        self._run.take_rest()
        usage, cores = tree_usage(), core_time() - self._cores
        figures = self._run.columns(usage.cpu_s - self._usage.cpu_s, cores)
        figures["peak_mem_mb"] = self._memory.end()
        figures["page_cache"] = page_cache_state(self._usage.read_bytes, usage.read_bytes)
        return self._run.n_images - self._n_first, figures


if __name__ == "__main__":
    os.environ["TMPDIR"] = tempfile.tempdir = sys.argv[2]
    serve(Connection(int(sys.argv[1])))
    shutil.rmtree(sys.argv[2], ignore_errors=True)  # the host does it too, but may have been killed


TIMEOUT_S = 900.0  # for one answer: preparing a format, or a whole epoch
_EXIT_TIMEOUT_S = 10.0


class Host(AbstractContextManager):
    """A loader in its own process, which ends with the context.

    As a variant of `compare`, iterating it is a run, and yields the number of images in the first batch and the rest.
    Then it has what `compare` takes from a loader that reports its own figures, see `labkit.peers.run`: the costs are
    those of the host's own process tree.
    """

    def __init__(self, peer: Peer, work: Work, *, timeout_s: float):
        import cloudpickle  # a loader may be defined in a notebook

        self.peer, self.batch_size, self.num_workers = peer, work.batch_size, work.num_workers
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
        with suppress(OSError):  # the process died: `ask` reports it
            self._pipe.send(sys.path)
            self._pipe.send_bytes(cloudpickle.dumps((peer, work)))

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def ask(self, command: str) -> Any:
        """Call a method of the process's `_Served`.

        Raises:
            HostError: it raised an exception, the process crashed, or it did not answer in time.
        """
        with suppress(OSError):  # the process died: see below
            self._pipe.send(command)
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

    def __iter__(self) -> Iterator[int]:
        self.ask("start")
        return self._count_images()

    def _count_images(self) -> Iterator[int]:
        yield self.ask("take_first")
        n_rest, figures = self.ask("take_rest")
        vars(self).update(figures)
        if n_rest:
            yield n_rest

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
