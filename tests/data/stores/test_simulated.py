"""SimulatedStore: the same bytes, and the time that a disk or a network would take, as worked out by hand."""

import copy
import multiprocessing
import os
import pickle
import random
import subprocess
import sys
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from labkit import FolderStore, HttpStore, TarStore
from labkit.course import DISKS, SimulatedStore
from labkit.data import simulated_disks as simulated
from labkit.data.simulated_disks import Disk
from labkit.data.stores import HasExtents
from tests.children import in_children
from tests.memory_store import MemoryStore
from tests.tars import make_tar

SIZES = {"a.jpg": 1000, "b.jpg": 2000, "c.jpg": 3000}
# By ustar's layout: a header of 512 bytes, then the data up to the next multiple of 512.
HEADERS, DATA = (0, 1536, 4096), {"a.jpg": 512, "b.jpg": 2048, "c.jpg": 4608}
DISK = Disk("slow disk", seek_ms=10.0, bandwidth_mb_per_s=1.0, one_head=True, readahead_bytes=4096)
SEEKS = replace(DISK, bandwidth_mb_per_s=float("inf"), readahead_bytes=0)


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "photos").mkdir()
    for name, size in SIZES.items():
        (tmp_path / "photos" / name).write_bytes(random.Random(size).randbytes(size))
    return tmp_path / "photos"


@pytest.fixture
def tar(folder) -> Path:
    files = {name: (folder / name).read_bytes() for name in SIZES}
    path = make_tar(folder.parent / "photos.tar", files, format=tarfile.USTAR_FORMAT)
    with tarfile.open(path) as tar:
        assert [info.offset for info in tar] == list(HEADERS)
        assert {info.name: info.offset_data for info in tar} == DATA
    return path


def dry(store, disk: Disk = DISK) -> SimulatedStore:
    return SimulatedStore(store, disk, wait=False)


def seconds(trips: int, n_bytes: int, disk: Disk = DISK) -> float:
    return trips * (disk.seek_ms + disk.latency_ms) / 1000 + n_bytes / disk.bandwidth_mb_per_s / 1e6


def busy_after(store: SimulatedStore, *keys: str) -> float:
    before = store.busy_s
    for key in keys:
        store.read(key)
    return pytest.approx(store.busy_s - before)


def test_the_bytes_are_the_stores(folder, tar):
    oracle = FolderStore(folder)
    for store in (oracle, TarStore(tar)):
        late = dry(store, DISKS["hdd"])
        assert list(late.keys()) == oracle.keys()
        assert len(late) == 3
        assert list(map(late.read, SIZES)) == list(map(oracle.read, SIZES))
        with pytest.raises(KeyError, match=r"no\.jpg"):
            late.read("no.jpg")
        assert repr(late) == f"SimulatedStore({store!r}, simulated hard disk)"
        assert late.storage == "simulated hard disk"


# Images that are read, the disk's trips and its bytes, by hand. Gaps of up to 4096 bytes are read over.
COSTS = {
    # One trip to a file's inode, one to its data; nothing counts as cached.
    "folder": [("a", 2, 1000), ("bc", 4, 5000), ("cc", 4, 6000)],
    # The file is opened; then each image comes after a gap.
    "index, in order": [("a", 2, 1000), ("b", 0, 2000 + (2048 - 1512)), ("c", 0, 3000 + (4608 - 4048))],
    # Back, back, on, and back to its own begin.
    "index": [("c", 2, 3000), ("b", 1, 2000), ("a", 1, 1000), ("c", 0, 3000 + (4608 - 1512)), ("c", 1, 3000)],
}  # fmt: skip


@pytest.mark.parametrize("case", COSTS)
def test_costs(folder, tar, case):
    mode = case.partition(",")[0]
    store = dry(FolderStore(folder) if mode == "folder" else TarStore(tar))
    assert store.busy_s == 0
    for images, trips, n_bytes in COSTS[case]:
        assert busy_after(store, *(f"{image}.jpg" for image in images)) == seconds(trips, n_bytes)
    _, trips, n_bytes = zip(*COSTS[case], strict=True)
    assert store.busy_s == pytest.approx(seconds(sum(trips), sum(n_bytes)))


@pytest.mark.parametrize(("readahead", "trips", "gap"), [(536, 0, 536), (535, 1, 0), (0, 1, 0)])
def test_gaps_up_to_the_readahead_are_read_over(tar, readahead, trips, gap):
    store = dry(TarStore(tar), replace(DISK, readahead_bytes=readahead))
    store.read("a.jpg")
    assert busy_after(store, "b.jpg") == seconds(trips, 2000 + gap)


def test_a_network_asks_once_where_a_disk_seeks(folder, tar):
    disk = Disk("far away", latency_ms=30.0, bandwidth_mb_per_s=2.0, readahead_bytes=0)
    assert busy_after(dry(FolderStore(folder), disk), "a.jpg") == seconds(2, 1000, disk)
    both = replace(disk, seek_ms=5.0)
    assert busy_after(dry(TarStore(tar), both), "c.jpg", "a.jpg") == seconds(3, 4000, both)
    assert seconds(1, 0, both) == pytest.approx(0.035)


def test_a_store_that_cannot_say_pays_for_a_file_a_read(folder):
    store = MemoryStore({name: (folder / name).read_bytes() for name in SIZES})
    assert busy_after(dry(store), "a.jpg", "b.jpg", "b.jpg") == seconds(6, 5000)
    assert not isinstance(HttpStore("http://127.0.0.1:1", keys=["a.jpg"]), HasExtents)


def test_unknown_keys_cost_nothing(tar):
    store = dry(TarStore(tar))
    with pytest.raises(KeyError):
        store.read("no.jpg")
    assert store.busy_s == 0
    assert busy_after(store, "a.jpg") == seconds(2, 1000)  # still the first read


@pytest.mark.parametrize(
    ("field", "value"), [("seek_ms", -1), ("latency_ms", -0.1), ("readahead_bytes", -1), ("bandwidth_mb_per_s", 0)]
)
def test_disks_that_cannot_be(field, value):
    with pytest.raises(ValueError, match="bandwidth_mb_per_s must be > 0"):
        Disk("wrong", **{field: value})


def test_the_disks_that_are_there(tar):
    """A random read of a hard disk is a seek; sizes hardly matter. The others have no head that moves."""
    for name, disk in DISKS.items():
        store = dry(TarStore(tar), disk)
        assert busy_after(store, "c.jpg", "a.jpg") == seconds(3, 4000, disk)
        assert disk.one_head == (name == "hdd")


# Waiting.


def test_it_waits_at_least_as_long(folder):
    store = SimulatedStore(FolderStore(folder), DISK)
    start = time.perf_counter()
    for key in store.keys():  # noqa: SIM118
        store.read(key)
    assert time.perf_counter() - start >= seconds(6, 6000)
    assert store.busy_s == pytest.approx(seconds(6, 6000))


def test_without_waiting_nobody_sleeps(folder, monkeypatch):
    monkeypatch.setattr(simulated.time, "sleep", None)
    dry(FolderStore(folder)).read("a.jpg")


class Sleepers:
    """In place of `time.sleep`: counts who sleeps at the same time, for as long as it takes `wanted` to meet."""

    def __init__(self, wanted: int):
        self.barrier, self.lock, self.now, self.most = threading.Barrier(wanted), threading.Lock(), 0, 0

    def __call__(self, seconds: float) -> None:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        self.barrier.wait(30)
        with self.lock:
            self.now -= 1


@pytest.mark.parametrize(("one_head", "at_once"), [(True, 1), (False, 3)])
def test_one_head_serves_one_at_a_time(folder, monkeypatch, one_head, at_once):
    store = SimulatedStore(FolderStore(folder), replace(DISK, one_head=one_head))
    sleepers = Sleepers(at_once)
    with monkeypatch.context() as patch:
        patch.setattr(simulated.time, "sleep", sleepers)
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(store.read, list(SIZES) * 4))
    assert sleepers.most == at_once
    assert store.busy_s == pytest.approx(seconds(24, 24_000))


# Processes and threads.


def read_all(store: SimulatedStore) -> int:
    return len([store.read(key) for key in list(SIZES) * 5])


def test_threads_lose_no_time(folder, tar):
    files, members = dry(FolderStore(folder)), dry(TarStore(tar), SEEKS)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read_all, [files] * 8))
        list(pool.map(members.read, ["a.jpg"] * 100))
    assert files.busy_s == pytest.approx(seconds(8 * 30, 8 * 30_000))
    assert members.busy_s == pytest.approx(seconds(1 + 100, 0, SEEKS))  # opened once, whoever came first


@pytest.mark.parametrize(("start_method", "processes"), [("fork", 4), ("spawn", 1)])
def test_one_head_for_all_processes(folder, start_method, processes):
    store = dry(FolderStore(folder))
    read_all(store)
    assert in_children(start_method, read_all, *[(store,)] * processes) == [15] * processes
    assert store.busy_s == pytest.approx(seconds((1 + processes) * 30, (1 + processes) * 30_000))


def first_reads(store: SimulatedStore) -> tuple[float, float]:
    start = store.busy_s
    store.read("a.jpg")
    once = store.busy_s
    store.read("a.jpg")
    return once - start, store.busy_s - once


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_each_process_opens_its_own_files(tar, start_method):
    store = dry(TarStore(tar), SEEKS)
    first, later = pytest.approx(seconds(2, 0, SEEKS)), pytest.approx(seconds(1, 0, SEEKS))
    assert first_reads(store) == (first, later)
    assert in_children(start_method, first_reads, (store,)) == [(first, later)]
    assert first_reads(store) == (later, later)


@pytest.mark.parametrize("copied", [lambda store: pickle.loads(pickle.dumps(store)), copy.deepcopy])
def test_copies_move_the_same_head(folder, copied):
    store = dry(FolderStore(folder))
    again = copied(store)
    again.read("a.jpg")
    store.read("b.jpg")
    assert store.busy_s == again.busy_s == pytest.approx(seconds(4, 3000))
    assert (again.disk, again.wait) == (store.disk, False)


def test_a_killed_reader_leaves_the_head_free(folder):
    """Killed in the middle of a read that takes minutes, with the head its own."""
    store = SimulatedStore(FolderStore(folder), replace(DISK, seek_ms=300_000))
    worker = multiprocessing.get_context("fork").Process(target=store.read, args=("a.jpg",))
    worker.start()
    store.wait = False
    time.sleep(0.3)  # it has, or is about to have, the head
    worker.kill()
    worker.join()
    assert store.busy_s >= 0
    assert store.read("b.jpg") == (folder / "b.jpg").read_bytes()


def test_a_file_that_is_gone_before_it_is_no_error(folder):
    """As where a system clears its temporary files: nothing may be printed at the end."""
    program = (
        "import sys, labkit as lk, labkit.course, tempfile, pathlib\n"
        "store = labkit.course.SimulatedStore(lk.FolderStore(sys.argv[1]))\n"
        "for path in pathlib.Path(tempfile.gettempdir()).glob('labkit-disk-*'): path.unlink()\n"
        "del store\n"
    )
    environment = {**os.environ, "TMPDIR": str(folder.parent)}
    ended = subprocess.run([sys.executable, "-c", program, folder], env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_its_file_goes_with_it(folder):
    store = dry(FolderStore(folder))
    path = Path(store._position_path)
    child = os.fork()
    if not child:
        del store
        os._exit(0)
    os.waitpid(child, 0)
    assert path.exists()
    del store
    assert not path.exists()
