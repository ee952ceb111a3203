"""Bytes at an offset; values made once in each process, whatever forks and threads do; whole files or none."""

import copy
import io
import os
import pickle
import random
import threading
import time
import uuid
from functools import partial
from pathlib import Path

import fsspec
import pytest

from labkit import TarStore, open_store
from labkit.core.lazy import Lazy, PerProcess
from labkit.data.blobs import base as blobs
from labkit.data.blobs.base import BlobFile, open_buffered
from labkit.data.blobs.local import LocalBlob
from labkit.data.blobs.opening import is_url, open_blob
from tests.children import in_children

DATA = random.Random(0).randbytes(100_000)


@pytest.fixture
def path(tmp_path) -> Path:
    path = tmp_path / "a.bin"
    path.write_bytes(DATA)
    return path


class Memory:
    """A blob in memory that counts what is asked of it, and gives a little at a time where it should."""

    name = "memory"

    def __init__(self):
        self.asked: list[tuple[int, int]] = []

    def fingerprint(self) -> tuple[int, str]:
        return len(DATA), "1"

    def read_at(self, offset: int, size: int) -> bytes:
        self.asked.append((offset, size))
        return DATA[offset : offset + size]


def in_memory(path: Path) -> blobs.Blob:
    url = f"memory://{uuid.uuid4()}/a.bin"
    fsspec.filesystem("memory").pipe_file(url, DATA)
    return open_blob(url)


KINDS = {"path": open_blob, "file://": lambda path: open_blob(f"file://{path}"), "memory://": in_memory}


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_at_offsets(path, kind):
    blob, own = KINDS[kind](path), random.Random(1)
    for _ in range(50):
        offset, size = own.randrange(len(DATA)), own.choice([0, 1, 512, 5000, 200_000])
        assert blob.read_at(offset, size) == DATA[offset : offset + size]
    assert blob.read_at(len(DATA) - 1, 10) == DATA[-1:]
    assert blob.fingerprint()[0] == len(DATA)
    assert blob.fingerprint() == KINDS[kind](path).fingerprint() or kind == "memory://"


def test_the_stamp_changes_with_the_contents(path):
    for blob in (open_blob(path), open_blob(f"file://{path}")):
        before = blob.fingerprint()
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1_000_000_000))
        assert blob.fingerprint()[0] == before[0]
        assert blob.fingerprint()[1] != before[1]


def test_the_stamp_of_an_object_in_memory_changes(path):
    blob = in_memory(path)
    before = blob.fingerprint()
    assert before[1]
    filesystem, place = blob._client._filesystem()
    filesystem.pipe_file(place, DATA[::-1])
    assert blob.fingerprint() != before


@pytest.mark.parametrize("place", ["no.bin", "file:///no/no.bin", "memory://no/no.bin"])
def test_missing_files(place):
    with pytest.raises(FileNotFoundError, match=r"no\.bin"):
        open_blob(place).fingerprint()


@pytest.mark.parametrize("place", ["a.tar", "http://127.0.0.1:1/a.tar"])
@pytest.mark.parametrize("opened", [TarStore, open_store])
def test_options_that_nobody_takes_are_an_error(place, opened):
    with pytest.raises(TypeError, match="mod: only object storage takes options"):
        opened(place, mod="tarfile")


def test_reads_that_come_in_pieces(path, monkeypatch):
    """As from a network disk, or for more than 2 GB."""
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda descriptor, size, offset: pread(descriptor, min(size, 700), offset))
    assert LocalBlob(path).read_at(100, 50_000) == DATA[100:50_100]
    assert LocalBlob(path).read_at(99_000, 5000) == DATA[99_000:]


def test_a_remote_file_is_a_file():
    file, oracle, own = open_buffered(Memory()), io.BytesIO(DATA), random.Random(2)
    for _ in range(300):
        if own.random() < 0.5:
            place = own.choice([(own.randrange(120_000), 0), (-own.randrange(len(DATA)), 2)])
            assert file.seek(*place) == oracle.seek(*place)
        size = own.choice([0, 1, 512, 9000, -1])
        assert file.read(size) == oracle.read(size)
        assert file.tell() == oracle.tell()
    file.seek(10)
    assert BlobFile(Memory()).seek(5, io.SEEK_CUR) == 5


def test_a_remote_file_asks_for_much_at_a_time():
    blob = Memory()
    file = open_buffered(blob)
    for offset in range(0, len(DATA), 512):
        file.seek(offset)
        file.read(512)
    assert blob.asked == [(0, len(DATA))]


@pytest.mark.parametrize(
    ("place", "expected"),
    [("http://a/b", True), ("s3://a", True), ("file:///a", True), ("a/b", False), ("C:/a", False), (Path("a"), False)],
)
def test_what_is_a_url(place, expected):
    assert is_url(place) is expected


# Once in each process.


def pid_and_noise() -> tuple[int, float]:
    return os.getpid(), random.SystemRandom().random()


def slowly(pause: threading.Event, made: list) -> float:
    pause.wait(10)
    made.append(random.SystemRandom().random())
    return made[-1]


def in_child(function, start_method: str = "fork"):
    (result,) = in_children(start_method, function, ())
    return result


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
@pytest.mark.parametrize("used_before", [False, True])
def test_a_value_for_each_process(start_method, used_before):
    value = PerProcess(pid_and_noise)
    if used_before:
        assert value() == value()
        assert value()[0] == os.getpid()
    assert in_child(value, start_method)[0] != os.getpid()
    assert value()[0] == os.getpid()


def test_a_value_that_forks_keep():
    value = Lazy(pid_and_noise)
    assert in_child(value, "fork")[0] != os.getpid()  # there it was used for the first time
    made = value()
    assert made == value() == in_child(value, "fork")
    assert made[0] == os.getpid()
    assert in_child(value, "spawn")[0] != os.getpid()


@pytest.mark.parametrize("kind", [Lazy, PerProcess])
def test_threads_share_one_value(kind):
    pause, made = threading.Event(), []
    value = kind(partial(slowly, pause, made))
    got: list[float] = []
    threads = [threading.Thread(target=lambda: got.append(value())) for _ in range(20)]
    for thread in threads:
        thread.start()
    pause.set()
    for thread in threads:
        thread.join()
    assert got == made * 20
    assert len(made) == 1


@pytest.mark.parametrize(("kind", "owner"), [(Lazy, None), (PerProcess, None), (PerProcess, -1)])
def test_a_fork_while_another_thread_makes_the_value(kind, owner):
    """The child must not wait for a lock whose holder it does not have."""
    parent, entered, release = os.getpid(), threading.Event(), threading.Event()

    def make() -> int:
        if os.getpid() == parent:
            entered.set()
            release.wait(30)
        return os.getpid()

    value = kind(make)
    value._owner = owner  # -1: made in an ancestor, of which this process is a fork
    thread = threading.Thread(target=value)
    thread.start()
    entered.wait(10)
    child = os.fork()
    if not child:
        os._exit(0 if value() == os.getpid() else 1)
    assert status_within(child, 20) == 0
    release.set()
    thread.join()
    assert value() == parent


def status_within(child: int, seconds: float) -> int | None:
    """The exit status, or None for a child that had to be killed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return None


def test_a_failure_is_not_kept():
    answers = iter([OSError("not yet"), 5])

    def make() -> int:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    value = PerProcess(make)
    with pytest.raises(OSError, match="not yet"):
        value()
    assert value() == value() == 5


@pytest.mark.parametrize("kind", [Lazy, PerProcess])
@pytest.mark.parametrize("copied", [lambda value: pickle.loads(pickle.dumps(value)), copy.deepcopy])
def test_copies_make_their_own(kind, copied):
    value = kind(pid_and_noise)
    assert copied(value)() != value()
    assert type(copied(value)) is kind


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_files_are_closed_with_their_blobs(path):
    import gc

    before = descriptors()
    gc.disable()  # references must do: a collection may be long in coming
    try:
        for _ in range(50):
            blob = LocalBlob(path)
            blob.read_at(0, 1)
            again = pickle.loads(pickle.dumps(blob))
            again.read_at(0, 1)
        assert descriptors() <= before + 2
    finally:
        gc.enable()


def test_a_file_is_opened_once_and_lazily(path, monkeypatch):
    before = descriptors()
    blob = LocalBlob(path)
    blob.fingerprint()
    assert descriptors() == before
    for offset in range(10):
        blob.read_at(offset, 5)
    assert descriptors() == before + 1
