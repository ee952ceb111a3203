"""Shared by all unit tests."""

import gc
import multiprocessing
import os
import re
import signal
import sys
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import matplotlib
import psutil
import pytest
import torch

import labkit as lk
from labkit.util.machine import usable_cores
from tests import children, turns

matplotlib.use("Agg")
os.environ.setdefault("TQDM_DISABLE", "1")  # what tests start says nothing on stderr but errors
# Threads of torch that wait sleep: with more processes than cores, those that spin keep the others from their work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


# A shell ignores SIGINT in its background jobs, and so would all processes that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# pytest-xdist's processes run no script, and workers would start from a fork server in them, as in a notebook. This one
# is imported again by processes that are not forked.
sys.modules["__main__"].__dict__.setdefault("__file__", children.__file__)

# Workers that a fork server starts then import nothing slow; each spawned one would import torch again.
multiprocessing.get_context("forkserver").set_forkserver_preload(["labkit.loading.torch_loader"])

_MAX_PROCESSES = 4  # each loads torch


def pytest_configure(config):
    turns.register(config)


def pytest_xdist_auto_num_workers(config):
    """One more than the usable cores, since notebooks wait; none for a single file, whose tests share one anyway."""
    is_single_file = len(config.args) == 1 and Path(config.args[0].partition("::")[0]).is_file()
    return 0 if is_single_file else min(usable_cores() + 1, _MAX_PROCESSES)


def pytest_collection_finish():
    """Exempt what is imported by now from garbage collection, of which every pass would take half a second."""
    gc.freeze()


def pytest_unconfigure():
    """Undo it: what is not collected at exit, Triton's bindings report as leaks."""
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def _no_process_is_left():
    """Workers that live on are measured with the next test's, and slow down all that follow."""
    yield
    _, alive = psutil.wait_procs(_own_children(), timeout=10)
    assert not alive, f"left behind by this module: {[process.cmdline() for process in alive]}"


@pytest.fixture(params=["simulated", pytest.param("real", marks=pytest.mark.cuda)])
def cuda(request):
    """A CUDA device: everywhere a simulated one, whose simulation this gives, and where there is one a real one."""
    if request.param == "real":
        yield None
        return
    with lk.simulated_cuda() as simulation:
        yield simulation


def _own_children() -> list[psutil.Process]:
    """Without the two servers that `multiprocessing` starts once and keeps, and the one of tests/forked.py."""

    def is_kept(process: psutil.Process) -> bool:
        with suppress(psutil.NoSuchProcess):
            return (
                re.search(r"\b(resource_tracker|forkserver|tests\.forked)\b", " ".join(process.cmdline())) is not None
            )
        return False

    return [child for child in psutil.Process().children() if not is_kept(child)]


_IN_NEW_PROCESSES = {"spawn", "forkserver", "ray"}


def _is_exhaustive(item: pytest.Item) -> bool:
    """Marked so, in a browser, or with processes that are not forked, of which each imports torch again."""
    called = getattr(item, "callspec", None)  # of a test with parameters
    parameters = called.params.values() if called else ()
    return (
        item.get_closest_marker("exhaustive") is not None
        or "chromium" in getattr(item, "fixturenames", ())
        or any(value in _IN_NEW_PROCESSES for value in parameters if isinstance(value, str))
    )


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
    """Mark the exhaustive tier, and skip what cannot run here."""
    for item in items:
        if _is_exhaustive(item):
            item.add_marker("exhaustive")
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.path.name == "08_shard_formats.ipynb" and not find_spec("s3fs"):
            remedy = 's3fs is not installed: python -m pip install -e ".[s3]"'
            item.add_marker(pytest.mark.skip(reason=remedy))


@pytest.fixture(autouse=True)
def _nothing_is_left_for_the_next_test():
    """Variables that the command line sets for its kernels, a recorder, guesses that would be scored, open figures."""
    with mock.patch.dict(os.environ):
        yield
    from matplotlib import pyplot

    from labkit.measure import recorder

    recorder.set_recorder(None)
    recorder.guesses.clear()
    pyplot.close("all")


@pytest.fixture
def recorded_frames(tmp_path):
    """The folder where frames are recorded during the test, as in the kernels of a tour."""
    from labkit.app.recording import FolderRecorder
    from labkit.measure.recorder import set_recorder

    set_recorder(FolderRecorder(tmp_path / "frames"))
    return tmp_path / "frames"


@pytest.fixture
def n_open_files():
    """Counts the files opened since the test began that are still open. Those of earlier tests may close meanwhile."""

    def held() -> set[tuple[str, str]]:
        folder = "/proc/self/fd"
        descriptors = os.listdir(folder)  # its own is closed again
        return {(name, os.readlink(f"{folder}/{name}")) for name in descriptors if os.path.lexists(f"{folder}/{name}")}

    earlier = held()
    return lambda: len(held() - earlier)


N_PHOTOS = 24


@pytest.fixture(scope="session")
def photo_set(tmp_path_factory) -> Path:
    """24 photos and their manifest, made once for all tests: to read, never to change."""
    from labkit import make_photos

    return make_photos(tmp_path_factory.mktemp("photos") / "set", N_PHOTOS, progress=False)


@pytest.fixture(scope="session")
def first_photos(photo_set, tmp_path_factory):
    """`first_photos(n)`: a folder of the first n of `photo_set`, n up to 24, without a manifest: to read."""
    from labkit.data.samples import photo_key

    @cache
    def link(count: int) -> Path:
        assert count <= N_PHOTOS
        folder = tmp_path_factory.mktemp("first_photos")
        for key in map(photo_key, range(count)):
            (folder / key).parent.mkdir(exist_ok=True)
            os.link(photo_set / key, folder / key)
        return folder

    return link


@pytest.fixture
def frame_of():
    """Builds a frame of runs from label -> images per second of each round, as `compare` would have measured them."""
    from labkit.measure.frames import make_frame

    def build(rates: dict[str, list[float]], baseline: str, **factors):
        rows = [
            {
                "variant": label, "round": number, "order": order, "is_warmup": False, "n_images": 100,
                "startup_s": 0.1, "first_batch_s": 0.01, "steady_s": 100 / rate, "images_per_s": rate,
                "cpu_s": 0.5, "peak_mem_mb": 100.0,
            }
            for order, (label, values) in enumerate(rates.items())
            for number, rate in enumerate(values)
        ]  # fmt: skip
        return make_frame(rows, **{"experiment": "test", "baseline": baseline, **factors})

    return build


@pytest.fixture
def runs_of(frame_of):
    """Builds a frame whose variants are exactly so many times as fast as its baseline, with rounds that vary by 1 %."""

    def build(experiment, **speedups):
        wobble = [0.99, 1.01, 1.0, 1.01, 0.99]
        rates = {name: [100 * speedup * one for one in wobble] for name, speedup in speedups.items()}
        return frame_of({"base": [100] * 5, **rates}, "base", experiment=experiment)

    return build
