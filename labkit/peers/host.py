"""A separate process for each loader of a comparison.

A loader that crashes, hangs or changes global settings cannot harm the others, and its memory and CPU time do not
include workers that another loader keeps.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Pipe
from typing import Any

from labkit.measure import apart
from labkit.peers.peer import Peer, Work

TIMEOUT_S = 900.0  # for one answer: preparing a format, or a whole epoch
_EXIT_TIMEOUT_S = 10.0


class HostError(Exception):
    """What went wrong in a host, in one line."""


class Host(contextlib.AbstractContextManager):
    """A loader in its own process. A context manager; `ask` takes a command of `labkit.peers.serve`."""

    def __init__(self, peer: Peer, work: Work, *, timeout_s: float = TIMEOUT_S):
        import cloudpickle  # a loader may be defined in a notebook

        self._timeout_s = timeout_s
        self._pipe, child_pipe = Pipe()
        self._folder = tempfile.mkdtemp(prefix="labkit-peer-")  # for what killed workers leave behind
        with child_pipe:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "labkit.peers.serve", str(child_pipe.fileno()), self._folder],
                pass_fds=[child_pipe.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, start_new_session=True,  # Ctrl-C comes to us, and we close the host
            )  # fmt: skip
        apart.add(self._process.pid)
        with contextlib.suppress(OSError):  # the process died: `answer` reports it
            self._pipe.send(sys.path)
            self._pipe.send_bytes(cloudpickle.dumps((peer, work)))

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def ask(self, command: str) -> Any:
        """Send a command and wait for its answer."""
        with contextlib.suppress(OSError):  # the process died: `answer` reports it
            self._pipe.send(command)
        return self.answer()

    def answer(self) -> Any:
        """Wait for the next answer.

        Raises:
            HostError: the command raised an exception, the process crashed, or it did not answer in time.
        """
        status, value = self._receive()
        if status == "error":
            raise HostError(value)
        return value

    def hang_up(self) -> None:
        """Let the process end, without waiting for it."""
        self._pipe.close()

    def close(self) -> None:
        """End the process and all that it started."""
        self.hang_up()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # kills orphaned workers, too
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
        apart.discard(self._process.pid)

    def _receive(self) -> tuple[str, Any]:
        deadline = time.monotonic() + self._timeout_s
        try:
            while not self._pipe.poll(1):
                if self._process.poll() is not None:  # its orphans may hold the pipe open
                    raise EOFError
                if time.monotonic() > deadline:
                    self._process.kill()
                    raise HostError(f"gave no answer for {self._timeout_s:.0f} s")
            return self._pipe.recv()
        except (EOFError, OSError):
            raise HostError(self._describe_exit()) from None

    def _describe_exit(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_EXIT_TIMEOUT_S)
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            return f"its process ended {how}"
        return "its process no longer answers"


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
