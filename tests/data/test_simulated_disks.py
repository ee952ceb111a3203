"""SimulatedStore: the same bytes, and the time that a disk or a network would take, as worked out by hand."""

import multiprocessing
import random
import tarfile
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from labkit import FolderStore, HttpStore, TarStore
from labkit.course import DISKS, SimulatedStore
from labkit.data.simulated_disks import OBJECT_LATENCY_MS, Disk
from labkit.data.stores import HasExtents
from tests.children import in_children
from tests.memory_store import MemoryStore
from tests.tars import make_tar

SIZES = {"a.jpg": 1000, "b.jpg": 2000, "c.jpg": 3000}
FILES = {name: random.Random(size).randbytes(size) for name, size in SIZES.items()}
# By ustar's layout: a header of 512 bytes, then the data up to the next multiple of 512.
HEADERS, DATA = (0, 1536, 4096), {"a.jpg": 512, "b.jpg": 2048, "c.jpg": 4608}
DISK = Disk("slow disk", seek_ms=10.0, bandwidth_mb_per_s=1.0, one_head=True, readahead_bytes=4096)
SEEKS = replace(DISK, bandwidth_mb_per_s=float("inf"), readahead_bytes=0)


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path, monkeypatch) -> Path:
    """Where positions of heads are kept."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("disk") / "photos"
    folder.mkdir()
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture(scope="module")
def tar(folder) -> Path:
    path = make_tar(folder.parent / "photos.tar", FILES, format=tarfile.USTAR_FORMAT)
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
    for store in (FolderStore(folder), TarStore(tar)):
        late = dry(store, DISKS["hdd"])
        with pytest.raises(KeyError, match=r"no\.jpg"):
            late.read("no.jpg")
        assert late.busy_s == 0
        assert list(late.keys()) == list(FILES)
        assert len(late) == 3
        assert list(map(late.read, FILES)) == list(FILES.values())
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
def test_a_disk_makes_trips_and_passes_bytes(folder, tar, case):
    store = dry(FolderStore(folder) if case == "folder" else TarStore(tar))
    assert store.busy_s == 0
    for images, trips, n_bytes in COSTS[case]:
        assert busy_after(store, *(f"{image}.jpg" for image in images)) == seconds(trips, n_bytes)
    _, trips, n_bytes = zip(*COSTS[case], strict=True)
    assert store.busy_s == pytest.approx(seconds(sum(trips), sum(n_bytes)))


def test_a_store_that_cannot_say_pays_for_a_file_a_read():
    assert busy_after(dry(MemoryStore(FILES)), "a.jpg", "b.jpg", "b.jpg") == seconds(6, 5000)
    assert not isinstance(HttpStore("http://127.0.0.1:1", keys=["a.jpg"]), HasExtents)


def test_each_disk_asks_or_seeks_for_a_random_read(tar):
    """A network asks once where a disk seeks, and has no head that moves. A GET names an object and returns it."""
    far_disk = Disk("a disk behind a network", seek_ms=5.0, latency_ms=30.0, bandwidth_mb_per_s=2.0, readahead_bytes=0)
    for disk in (*DISKS.values(), far_disk):
        assert busy_after(dry(TarStore(tar), disk), "c.jpg", "a.jpg") == seconds(2 + disk.trips_to_open, 4000, disk)
        assert disk.one_head == (disk is DISKS["hdd"])
    assert seconds(1, 0, far_disk) == pytest.approx(0.035)
    assert {name: disk.trips_to_open for name, disk in DISKS.items()} == {"hdd": 1, "network": 1, "object": 0}
    least, most = OBJECT_LATENCY_MS
    assert least < DISKS["object"].latency_ms < most


# Waiting.


@pytest.mark.parametrize("one_head", [True, False])
def test_it_waits_as_long_as_it_says_or_not_at_all(folder, monkeypatch, one_head):
    waits, disk = [], replace(DISK, one_head=one_head)
    monkeypatch.setattr(time, "sleep", waits.append)
    store = SimulatedStore(FolderStore(folder), disk)
    for key in FILES:
        store.read(key)
    assert waits == pytest.approx([seconds(2, size) for size in SIZES.values()])
    assert store.busy_s == pytest.approx(sum(waits))
    dry(FolderStore(folder), disk).read("a.jpg")
    assert len(waits) == 3


@pytest.mark.parametrize("one_head", [True, False])
def test_one_head_serves_one_at_a_time(folder, monkeypatch, one_head):
    """Without one, three threads wait together."""
    store = SimulatedStore(FolderStore(folder), replace(DISK, one_head=one_head))
    together, alone = threading.Barrier(3, timeout=30), threading.Lock()

    def sleep(seconds: float) -> None:
        if not one_head:
            together.wait()
        else:
            assert alone.acquire(blocking=False)
            threading.Event().wait(0.01)
            alone.release()

    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", sleep)
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(store.read, list(SIZES) * 4))
    assert store.busy_s == pytest.approx(seconds(24, 24_000))


# Processes and threads.


def read_all(store: SimulatedStore) -> int:
    return len([store.read(key) for key in list(SIZES) * 5])


def first_reads(files: SimulatedStore, members: SimulatedStore) -> tuple[int, float, float]:
    """Reads a folder; then how much a tar costs at the first read of a process, and at the second."""
    n_read, start = read_all(files), members.busy_s
    members.read("a.jpg")
    once = members.busy_s
    members.read("a.jpg")
    return n_read, once - start, members.busy_s - once


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_all_processes_share_a_head_and_each_opens_its_own_files(folder, tar, start_method):
    files, members = dry(FolderStore(folder)), dry(TarStore(tar), SEEKS)
    first, later = pytest.approx(seconds(2, 0, SEEKS)), pytest.approx(seconds(1, 0, SEEKS))
    assert first_reads(files, members) == (15, first, later)
    assert in_children(start_method, first_reads, (files, members)) == [(15, first, later)]
    assert first_reads(files, members) == (15, later, later)
    assert in_children(start_method, read_all, (files,), (files,)) == [15, 15]
    assert files.busy_s == pytest.approx(seconds(5 * 30, 5 * 30_000))


def test_a_killed_reader_leaves_the_head_free(folder, monkeypatch):
    """Killed in the middle of a read, with the head its own."""
    forks, store = multiprocessing.get_context("fork"), SimulatedStore(FolderStore(folder), DISK)
    has_head, never = forks.Event(), forks.Event()
    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", lambda seconds: has_head.set() or never.wait())
        reader = forks.Process(target=store.read, args=("a.jpg",))
        reader.start()
    assert has_head.wait(30)
    reader.kill()
    reader.join()
    store.wait = False
    assert store.read("b.jpg") == FILES["b.jpg"]
    assert busy_after(store, "b.jpg") == seconds(2, 2000)
