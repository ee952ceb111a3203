"""How long a loader holds Python's lock for an image: what bounds the cores that its threads can use."""

import ctypes
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from labkit.errors import GilError
from labkit.measure.steady import Factory, count_images
from labkit.util.machine import install_command

_PR_SET_PTRACER, _ANY = 0x59616D61, ctypes.c_ulong(-1)
_RATE_HZ = 250  # each sample stops the process for a moment


def gil_us_per_image(factory: Factory, *, seconds: float = 4.0) -> float:
    """Microseconds for which this process holds Python's lock (GIL) per image of a loader.

    One thread at a time holds it. So however many cores there are, threads of one process deliver at most
    1e6 / this number of images per second. Workers in other processes have locks of their own, and are not seen.
    Let one thread do the work: one that holds the lock while it waits for a core would count as holding it, so with
    as many threads as cores the answer is too high.

    The loader's passes are timed first. Then py-spy samples, 250 times a second, whether any thread holds the lock
    while more passes run; the share of samples times the time per image is the answer.

    Args:
        factory: Called for each pass, returns an iterable of batches, as for `compare`.
        seconds: Of sampling, rounded up to whole ones. With 4 s, a share of 10 % has a standard error of 1 %.

    Raises:
        GilError: py-spy is missing, or may not look into this process.

    Source: py-spy's `--gil`, https://github.com/benfred/py-spy.
    """
    seconds = math.ceil(seconds)
    program = shutil.which("py-spy", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if program is None:
        raise GilError(f"py-spy is missing: {install_command('peers')}")
    sum(map(count_images, factory()))  # starts workers and threads
    images_per_s = _rate(factory, lambda elapsed_s: elapsed_s < seconds / 2)
    with tempfile.TemporaryDirectory(prefix="labkit-gil-") as folder:
        samples = Path(folder) / "samples"
        command = [program, "record", "--pid", str(os.getpid()), "--gil", "--rate", str(_RATE_HZ), "--format", "raw"]
        command += ["--duration", str(seconds), "--output", str(samples)]
        pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        with _may_be_watched(), subprocess.Popen(command, **pipes) as sampler:
            _rate(factory, lambda _: sampler.poll() is None)
            message = sampler.communicate()[1].decode(errors="replace").strip()
        if sampler.returncode:
            reason = message.splitlines()[-1] if message else "no reason given"
            raise GilError(f"py-spy cannot look into this process: {reason}; in a container, allow SYS_PTRACE")
        n_held = sum(int(line.rsplit(" ", 1)[1]) for line in samples.read_text().splitlines())
    return n_held / (_RATE_HZ * seconds) / images_per_s * 1e6


def _rate(factory: Factory, goes_on: Callable[[float], bool]) -> float:
    """Images per second over whole passes."""
    n_images, begin = 0, time.perf_counter()
    while goes_on(time.perf_counter() - begin):
        n_images += sum(map(count_images, factory()))
    return n_images / (time.perf_counter() - begin)


@contextmanager
def _may_be_watched() -> Iterator[None]:
    """Let a child watch this process meanwhile, which Linux (Yama) may else allow a parent alone."""
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else lambda *_: 0
    prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_PTRACER, ctypes.c_ulong(0), 0, 0, 0)
