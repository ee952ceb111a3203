"""map_items: the results of a plain loop on every engine, whatever dies on the way."""

import errno
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import cloudpickle
import psutil
import pytest

import labkit as lk
from labkit.errors import ItemErrors
from tests.loaders import eventually
from tests.paths import contents

# As if its functions stood in a notebook: workers cannot import a test module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

HERE = {"engine": "local", "num_workers": 1}
PROCESSES = {"engine": "local", "num_workers": 2}
THREADS = {"engine": "threads", "num_workers": 2}
quiet_map = partial(lk.map_items, progress=False)


def each_way(*ways):
    names = {id(HERE): "here", id(PROCESSES): "processes", id(THREADS): "threads"}
    return pytest.mark.parametrize("way", ways or (HERE, PROCESSES, THREADS), ids=lambda way: names[id(way)])


def failed(function, items, **options) -> ItemErrors:
    with pytest.raises(ItemErrors) as failure:
        quiet_map(function, items, **options)
    return failure.value


@each_way()
def test_the_results_are_those_of_a_loop(way):
    factor = 3
    for count in (0, 1, 5000):
        items = [f"item {number}" for number in range(count)]
        assert quiet_map(lambda item: item * factor, iter(items), **way) == [item * factor for item in items]


@each_way(PROCESSES, THREADS)
def test_the_order_is_the_items_though_the_first_is_the_last_to_be_done(way, tmp_path):
    def wait_for_all_others(item):
        (tmp_path / str(item)).touch()
        while item == 0 and len(os.listdir(tmp_path)) < 9:
            time.sleep(0.01)
        return item, os.getpid(), signal.getsignal(signal.SIGINT)

    numbers, pids, handlers = zip(*quiet_map(wait_for_all_others, range(9), **way), strict=True)
    assert numbers == tuple(range(9))
    if way is PROCESSES:
        assert len(set(pids) - {os.getpid()}) == 2
        assert set(handlers) == {signal.SIG_IGN}, "Ctrl-C is for the parent alone"


@pytest.mark.parametrize("num_workers", [0, 1])
def test_none_or_one_worker_is_this_process(num_workers):
    assert quiet_map(lambda item: os.getpid(), range(2), num_workers=num_workers) == [os.getpid()] * 2


def test_what_is_done_is_left_out():
    def odd_only(item):
        if item % 2 == 0:
            raise AssertionError("was done")
        return item

    assert quiet_map(odd_only, range(5), is_done=lambda item: item % 2 == 0, **THREADS) == [None, 1, None, 3, None]
    for engine in ("local", "ray"):  # no cluster is started
        assert quiet_map(odd_only, range(5), is_done=lambda item: True, engine=engine) == [None] * 5


@each_way()
def test_failed_items_are_named_and_the_rest_is_done(way):
    def some_fail(item):
        if item == 3:
            raise ValueError("three\nand more lines")
        if item == 5:
            sys.exit(1)
        if item == 6:
            raise KeyError
        return item

    error = failed(some_fail, range(8), key=lambda item: f"photo {item}", **way)
    expected = {"photo 3": r"ValueError: three\nand more lines", "photo 5": "SystemExit: 1", "photo 6": "KeyError"}
    assert list(error.failures.items()) == list(expected.items())
    assert error.results == [0, 1, 2, None, 4, None, None, 7]
    listed = "; ".join(f"{key}: {text}" for key, text in expected.items())
    assert str(error) == f"3 of 8 items failed, the others are done: {listed}"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    alone = failed(some_fail, [3], key=lambda item: f"photo {item}", **way)
    assert str(alone) == f"1 of 1 items failed: {listed.partition('; ')[0]}"


def fill_up(folder, number: int) -> int:
    """From the eleventh item on, the disk has no room."""
    (folder / f"{number}").touch()
    if number >= 10:
        try:
            raise OSError(errno.ENOSPC, "No space left on device", f"{folder}/{number}.data")
        except OSError as error:
            raise ValueError("wrapped") from error  # as a reader of archives might
    return number


@each_way()
def test_a_full_disk_ends_the_work_and_names_the_file_and_what_is_done(way, tmp_path):
    told = r"the disk is full \(\d\d: .*\): 10 of 1000 shards are done.* run the same again"
    with pytest.raises(OSError, match=told):
        quiet_map(partial(fill_up, tmp_path), range(1000), unit="shard", **way)
    assert len(os.listdir(tmp_path)) < 100  # those that had begun


def test_a_file_that_is_too_large_for_its_disk_is_its_own_fault():
    def write(number):
        if number == 1:
            raise OSError(errno.EFBIG, "File too large")
        return number

    assert failed(write, range(4), **HERE).results == [0, None, 2, 3]


def test_many_failures_are_counted_not_listed():
    assert "more" not in str(failed(lambda item: 1 // (item // 10), range(20), **HERE))
    error = failed(lambda item: 1 // (item // 100), range(200), **HERE)
    assert str(error).endswith("9: ZeroDivisionError: integer division or modulo by zero; and 90 more (see .failures)")
    assert len(error.failures) == 100


class NotLoadable:
    def __init__(self, item):
        self.item = item

    def __reduce__(self):
        return NotLoadable.refuse, (self.item,)

    @staticmethod
    def refuse(item):
        raise ValueError(f"{item} does not load")


class OddError(Exception):
    def __init__(self, one, two):  # such an exception pickles, but does not load
        super().__init__(f"{one} {two}")


def test_what_cannot_travel_is_an_error_of_its_item():
    def awkward(item):
        if item == 1:
            return threading.Lock()
        if item == 2:
            return NotLoadable(item)
        if item == 3:
            raise OddError("odd", threading.Lock)
        return item

    error = failed(awkward, [0, 1, 2, 3, threading.Lock(), 5], key=lambda item: str(item)[:9], **PROCESSES)
    cannot = "TypeError: cannot pickle '_thread.lock' object"
    said = {"1": cannot, "2": "ValueError: 2 does not load", "3": "OddError: odd", "<unlocked": cannot}
    assert [(key, text[: len(said[key])]) for key, text in error.failures.items()] == list(said.items())
    assert error.results == [0, None, None, None, None, 5]
    with pytest.raises(RuntimeError, match=r"no worker can .* \(ValueError: 7 does not load"):  # once, not for each
        quiet_map(partial(isinstance, NotLoadable(7)), range(3), **PROCESSES)


@pytest.mark.exhaustive
def test_an_item_that_kills_workers_is_named_and_others_run_again(tmp_path):
    def deadly(item):
        marker = tmp_path / "died"
        if item == 3 or (item == 40 and not marker.exists()):
            if item == 40:
                marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    error = failed(deadly, range(100), **PROCESSES)
    assert (tmp_path / "died").exists()
    assert list(error.failures) == ["3"]
    assert "died twice" in error.failures["3"]
    assert error.results == [None if item == 3 else item for item in range(100)]


def test_nothing_is_lost_if_a_pool_breaks_while_it_takes_items(monkeypatch):
    taken, submit = [], ProcessPoolExecutor.submit

    def submit_to_a_breaking_pool(executor, *args):
        taken.append(args)
        if len(taken) == 6:  # two that start the workers, one that checks them, and two chunks
            raise OSError("handle is closed")
        return submit(executor, *args)

    monkeypatch.setattr(ProcessPoolExecutor, "submit", submit_to_a_breaking_pool)
    assert quiet_map(str, range(100), **PROCESSES) == [str(item) for item in range(100)]
    assert len(taken) > 6


@each_way(HERE, THREADS)
def test_an_interrupt_in_this_process_ends_the_call(way):
    def interrupted(item):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quiet_map(interrupted, range(9), **way)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"engine": "dask"}, "local, threads, ray"),
        ({"num_workers": -1}, "num_workers must be an integer >= 0, got -1"),
        ({"address": "10.0.0.1:6379"}, "engine='ray'"),
        pytest.param(
            {"engine": "ray", "address": "127.0.0.1:1"},
            r"127\.0\.0\.1:1 .*refused.*ray start --head",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_arguments_that_cannot_be_are_named(options, said):
    if options.get("engine") == "ray":
        needs_ray()
    with pytest.raises((ValueError, ConnectionError), match=said):
        quiet_map(abs, [1], **options)


def test_the_bar_starts_where_the_last_run_ended(monkeypatch, capsys):
    monkeypatch.setenv("TQDM_DISABLE", "0")
    options = {"is_done": lambda item: item < 2, "description": "photos", "unit": "photo", **HERE}
    lk.map_items(abs, range(5), **options)
    first = capsys.readouterr().err.strip("\r").partition("\r")[0]
    assert first.startswith("photos:  40%")
    assert "2/5 " in first
    assert "photo/s" in first
    lk.map_items(abs, range(5), progress=False, **options)
    assert capsys.readouterr().err == ""


NOTEBOOK = """
from dataclasses import dataclass
from labkit import map_items

@dataclass
class Photo:
    name: str

def grow(photo):
    return Photo(photo.name * FACTOR)

FACTOR = 2
assert map_items(grow, [Photo("a"), Photo("b")], num_workers=2) == [Photo("aa"), Photo("bb")]
print("done")
"""
IN_A_LOCK = """
from pathlib import Path
from labkit.util.files import file_lock
with file_lock(Path(__file__ + ".lock")):
"""


def run_python(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_functions_and_classes_of_a_notebook_travel():
    run = run_python("-c", NOTEBOOK)  # a main module without a file, as a kernel's is
    assert (run.returncode, run.stdout, run.stderr) == (0, "done\n", "")


def test_a_script_without_its_guard_is_told_so(tmp_path):
    """Its workers import it, and would do the same thing: they must not wait for a lock that it holds."""
    (tmp_path / "script.py").write_text(IN_A_LOCK + NOTEBOOK.replace("\n", "\n    "))
    run = run_python(tmp_path / "script.py")
    assert run.returncode == 1
    assert "under `if __name__ == '__main__':`" in run.stderr.splitlines()[-1]
    assert 'under `if __name__ == "__main__":`' in run.stderr  # by the worker


ENDLESS = """
import os, time
from pathlib import Path
from labkit import map_items

def sleep(item):
    Path({root!r}, str(os.getpid())).touch()
    while len(os.listdir({root!r})) < 2:
        time.sleep(0.01)
    time.sleep(60 if item == 0 else 0)
    Path({root!r}, "idle").touch()

map_items(sleep, range(2), num_workers=2)
"""


@pytest.mark.parametrize("blow", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_their_parent(tmp_path, blow):
    command = [sys.executable, "-c", ENDLESS.format(root=str(tmp_path))]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert eventually(lambda: len(os.listdir(tmp_path)) == 3, within_s=60)  # one is busy then, and one idle
    # Ctrl-C reaches the whole group, kill -9 the parent alone.
    os.killpg(process.pid, blow) if blow == signal.SIGINT else process.kill()
    _, said = process.communicate(timeout=20)
    assert process.returncode == -blow
    assert said.count("Traceback") <= 1  # the parent's own
    pids = [int(name) for name in os.listdir(tmp_path) if name != "idle"]
    assert eventually(lambda: not any(map(psutil.pid_exists, pids)), within_s=20)


@pytest.mark.exhaustive
def test_photos_are_the_same_from_every_engine(tmp_path):
    for name, options in {"one": {}, "threads": {"engine": "threads"}, "processes": {"engine": "local"}}.items():
        lk.make_photos(tmp_path / name, 2, num_threads=1 if name == "one" else 2, progress=False, **options)
    assert contents(tmp_path / "threads") == contents(tmp_path / "processes") == contents(tmp_path / "one")


def needs_ray() -> None:
    pytest.importorskip("ray", reason='Ray is not installed: python -m pip install -e ".[cluster]"')


@pytest.mark.exhaustive
def test_a_cluster_of_this_machine_gives_what_a_loop_gives():
    needs_ray()
    try:
        error = failed(lambda number: 60 // number, range(20), engine="ray", num_workers=2)
    finally:
        shutil.rmtree(Path(tempfile.gettempdir()) / "ray", ignore_errors=True)  # its logs
    assert error.failures == {"0": "ZeroDivisionError: integer division or modulo by zero"}
    assert error.results == [None, *(60 // number for number in range(1, 20))]


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"\[cluster\]"):
        quiet_map(abs, [1], engine="ray")
