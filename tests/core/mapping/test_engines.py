"""map_items: the results of a plain loop on every engine, whatever dies on the way."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import cloudpickle
import psutil
import pytest

from labkit.data.samples import make_photos, photo_bytes, photo_key
from labkit.errors import ItemErrors
from labkit.util import parallel as engine_module
from labkit.util.files import write_atomic
from labkit.util.parallel import Pool, map_items, process_pool
from tests.loaders import eventually

# As if its functions stood in a notebook: workers cannot import a test module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

HERE = {"engine": "local", "num_workers": 1}
PROCESSES = {"engine": "local", "num_workers": 2}
THREADS = {"engine": "threads", "num_workers": 2}
quiet_map = partial(map_items, progress=False)


def each_way(*ways):
    names = {id(HERE): "here", id(PROCESSES): "processes", id(THREADS): "threads"}
    return pytest.mark.parametrize("way", ways or (HERE, PROCESSES, THREADS), ids=lambda way: names[id(way)])


def failed(function, items, **options) -> ItemErrors:
    with pytest.raises(ItemErrors) as failure:
        quiet_map(function, items, **options)
    return failure.value


def tree(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@each_way()
@pytest.mark.parametrize("count", [0, 1, 7, 5000])
def test_the_results_are_those_of_a_loop(way, count):
    factor = 3
    items = [f"item {number}" for number in range(count)]
    assert quiet_map(lambda item: item * factor, items, **way) == [item * factor for item in items]


@each_way(PROCESSES, THREADS)
def test_the_order_is_the_items_even_if_the_first_is_last(way):
    def slow_first(item):
        time.sleep(0.3 if item == 0 else 0)
        return item

    assert quiet_map(slow_first, iter(range(30)), **way) == list(range(30))


def test_processes_are_others_and_as_many_as_asked(tmp_path):
    def pid(item):
        (tmp_path / str(item)).touch()
        while len(os.listdir(tmp_path)) < 2:  # until the other worker has begun
            time.sleep(0.01)
        return os.getpid()

    assert len(set(quiet_map(pid, range(2), **PROCESSES)) - {os.getpid()}) == 2


def test_the_parent_alone_hears_of_ctrl_c():
    ignored = [signal.SIG_IGN] * 3
    assert quiet_map(lambda item: signal.getsignal(signal.SIGINT), range(3), **PROCESSES) == ignored


@each_way()
def test_what_is_done_is_left_out(way):
    def odd_only(item):
        if item % 2 == 0:
            raise AssertionError("was done")
        return item

    assert quiet_map(odd_only, range(5), is_done=lambda item: item % 2 == 0, **way) == [None, 1, None, 3, None]
    assert quiet_map(odd_only, range(5), is_done=lambda item: True, **way) == [None] * 5


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


def test_many_failures_are_counted_not_listed():
    assert "more" not in str(failed(lambda item: 1 // (item // 10), range(20), **HERE))
    error = failed(lambda item: 1 // (item // 100), range(200), **HERE)
    assert str(error).endswith("9: ZeroDivisionError: integer division or modulo by zero; and 90 more (see .failures)")
    assert len(error.failures) == 100


class NotLoadable:
    def __init__(self, item):
        self.item = item

    def __reduce__(self):
        return NotLoadable._refuse, (self.item,)

    @staticmethod
    def _refuse(item):
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


def test_a_killed_worker_costs_nothing(tmp_path):
    def dies_once(item):
        marker = tmp_path / "died"
        if item == 40 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    assert quiet_map(dies_once, range(100), **PROCESSES) == list(range(100))
    assert (tmp_path / "died").exists()


def test_an_item_that_kills_its_workers_is_named():
    def deadly(item):
        if item in (3, 60):
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    error = failed(deadly, range(100), **PROCESSES)
    assert list(error.failures) == ["3", "60"]
    assert all("died twice" in text for text in error.failures.values())
    assert error.results == [None if item in (3, 60) else item for item in range(100)]


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


def test_all_workers_start_before_the_first_item():
    before = set(psutil.Process().children())
    with process_pool(str, 3) as pool:
        pool.result(pool.submit([]))
        workers = [child for child in set(psutil.Process().children()) - before if "spawn_main" in str(child.cmdline())]
    assert len(workers) == 3


def test_what_no_worker_can_load_fails_once():
    with pytest.raises(RuntimeError, match=r"no worker can .* \(ValueError: 7 does not load"):
        quiet_map(partial(isinstance, NotLoadable(7)), range(3), **PROCESSES)


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
    ],
)
def test_bad_arguments(options, said):
    with pytest.raises(ValueError, match=said):
        quiet_map(abs, [1], **options)


def test_the_bar_starts_where_the_last_run_ended(monkeypatch):
    bars, real = [], engine_module.progress_bar

    def recorded(**options):
        bars.append((options, real(**{**options, "show": False})))
        return bars[-1][1]

    monkeypatch.setattr(engine_module, "progress_bar", recorded)
    map_items(abs, range(5), is_done=lambda item: item < 2, description="photos", unit="photo", **HERE)
    assert bars[0][0] == {"show": True, "total": 5, "initial": 2, "desc": "photos", "unit": "photo"}


def test_a_bounded_number_of_items_is_in_flight():
    in_flight, most = set(), []

    @contextmanager
    def pool():
        def submit(items):
            future = Future()
            in_flight.add(future)
            most.append(len(in_flight))
            threading.Timer(0.002, finish, (future, items)).start()
            return future

        def finish(future, items):
            in_flight.discard(future)
            future.set_result((1e-9, [(item, None) for item in items]))

        yield Pool(submit, Future.result)

    count = 50_000
    outcomes = engine_module._pooled(pool, pool, list(range(count)), list(range(count)), 4)
    assert sorted(outcomes) == [(item, (item, None)) for item in range(count)]
    assert max(most) <= 4
    assert len(most) < count / 100  # cheap items travel many at a time


@pytest.mark.parametrize(
    ("size", "seconds", "fair_share", "expected"),
    [
        (1, 10.0, 100, 1), (1, 1e-6, 100, 2), (8, 0.025, 100, 16), (8, 0.1, 100, 4), (8, 0.0, 3, 3),
        (900, 0.0, 1e6, 1000),
    ],
)  # fmt: skip
def test_the_size_of_the_next_chunk(size, seconds, fair_share, expected):
    assert engine_module._next_size(size, seconds, fair_share) == expected


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


def run_python(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_functions_and_classes_of_a_notebook():
    run = run_python("-c", NOTEBOOK)  # a main module without a file, as a kernel's is
    assert (run.returncode, run.stdout, run.stderr) == (0, "done\n", "")


def test_a_script_without_its_guard_is_told_so(tmp_path):
    (tmp_path / "script.py").write_text(NOTEBOOK)
    run = run_python(tmp_path / "script.py")
    assert run.returncode == 1
    assert "under `if __name__ == '__main__':`" in run.stderr.splitlines()[-1]


ENDLESS = """
import os, time
from pathlib import Path
from labkit import map_items

def sleep(item):
    Path({root!r}, str(os.getpid())).touch()
    time.sleep(60 if item == 0 else 0.2)

map_items(sleep, range(2), num_workers=2)
"""


@pytest.mark.parametrize("blow", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_their_parent(tmp_path, blow):
    command = [sys.executable, "-c", ENDLESS.format(root=str(tmp_path))]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert eventually(lambda: len(os.listdir(tmp_path)) == 2, within_s=20)
    time.sleep(0.5)  # one worker is busy then, and one idle
    # Ctrl-C reaches the whole group, kill -9 the parent alone.
    os.killpg(process.pid, blow) if blow == signal.SIGINT else process.kill()
    _, said = process.communicate(timeout=20)
    assert process.returncode == -blow
    assert said.count("Traceback") <= 1  # the parent's own
    assert eventually(lambda: not any(psutil.pid_exists(int(pid)) for pid in os.listdir(tmp_path)), within_s=20)


@pytest.mark.parametrize("engine", ["threads", "local"])
def test_photos_are_the_same_from_every_engine(tmp_path, engine):
    make_photos(tmp_path / engine, 4, engine=engine, num_threads=2, progress=False)
    make_photos(tmp_path / "loop", 4, num_threads=1, progress=False)
    assert tree(tmp_path / engine) == tree(tmp_path / "loop")


def needs_ray() -> None:
    pytest.importorskip("ray", reason='Ray is not installed: python -m pip install -e ".[cluster]"')


@pytest.fixture(scope="module")
def cluster():
    """Two nodes that work, and a head that does not."""
    needs_ray()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    # Handlers for the exit would hold its gRPC clients, which Python 3.13 would free in every child forked later, where
    # their threads are not: SIGSEGV.
    head = {"num_cpus": 0, "include_dashboard": False}
    before = set(psutil.Process().children(recursive=True))
    try:
        cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
    except BaseException:  # it did not start in time, and Ray leaves what did start to the tests that follow
        for process in set(psutil.Process().children(recursive=True)) - before:
            process.kill()
        raise
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        yield cluster
    finally:
        cluster.shutdown()


@pytest.mark.exhaustive
def test_a_ray_node_is_killed_midway_and_the_output_is_the_same(cluster, tmp_path):
    out, nodes, count = tmp_path / "out", tmp_path / "nodes", 60
    nodes.mkdir()

    def make(number):
        import ray

        (nodes / ray.get_runtime_context().get_node_id()).touch()
        time.sleep(0.05)
        if number == 7:
            raise ValueError("seven")
        write_atomic(out / photo_key(number), photo_bytes(number))
        return photo_key(number)

    def kill_one_at_work():
        import ray

        def at_work():
            joined_by = ray.get_runtime_context().get_node_id()  # any of the three, and Ray refuses to remove it
            others = [node for node in cluster.worker_nodes if node.node_id != joined_by]
            return [node for node in others if (nodes / node.node_id).exists()]

        assert eventually(lambda: os.listdir(nodes) and at_work(), within_s=120)  # Ray takes its time to start
        cluster.remove_node(at_work()[0], allow_graceful=False)

    killer = threading.Thread(target=kill_one_at_work)
    killer.start()
    error = failed(make, range(count), engine="ray", address=cluster.address)
    killer.join()
    assert error.failures == {"7": "ValueError: seven"}
    assert error.results == [None if number == 7 else photo_key(number) for number in range(count)]
    files = {name: data for name, data in tree(out).items() if not name.endswith(".partial")}
    assert files == {photo_key(number): photo_bytes(number) for number in range(count) if number != 7}
    assert (len(os.listdir(nodes)), len(cluster.worker_nodes)) == (2, 1)


def test_no_ray_cluster_where_it_was_said_to_be():
    needs_ray()
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:1 .*refused.*ray start --head"):
        quiet_map(abs, [1], engine="ray", address="127.0.0.1:1")


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"\[cluster\]"):
        quiet_map(abs, [1], engine="ray")
