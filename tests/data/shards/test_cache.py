"""A local cache of shards: whole files or none, within a limit, for several processes, and never under a reader."""

import multiprocessing
import os
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

import labkit as lk
from labkit import course
from labkit.data import shard_cache as cache_module
from labkit.data.shard_cache import NoRoomError, ReadAhead, ShardCache
from tests.children import in_children
from tests.loading import eventually
from tests.shard_samples import samples

SIZE = 1000


class Blob:
    """A file in memory. `asked` counts its requests, and `hook(offset)` is called before bytes are given."""

    def __init__(self, name="a", version="1", size=SIZE):
        self.name, self.version, self.data = name, version, os.urandom(size)
        self.asked = Counter()
        self.hook = lambda offset: None

    def fingerprint(self):
        self.asked["size"] += 1
        return len(self.data), self.version

    def read_at(self, offset, size):
        self.asked["bytes"] += 1
        self.hook(offset)
        return self.data[offset : offset + size]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch, request):
    monkeypatch.setattr(cache_module, "CHUNK_BYTES", 50_000 if request.cls is TestReadShards else 100)


@pytest.fixture
def threads():
    with ThreadPoolExecutor(3) as pool:
        yield pool


def read(cache, blob, threads) -> bytes:
    with cache.open(blob, threads) as file:
        return file.read()


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class TestOneProcess:
    def test_bytes_are_fetched_once(self, tmp_path, threads):
        cache, blob = ShardCache(tmp_path / "new", 10 * SIZE), Blob(size=SIZE - 1)
        assert [read(cache, blob, threads) for _ in range(3)] == [blob.data] * 3
        assert blob.asked == {"size": 3, "bytes": 10}
        assert len(kept(tmp_path / "new")) == 1, "no lock and no part of a file is left"

    def test_chunks_are_fetched_at_the_same_time(self, tmp_path, threads):
        blob, barrier = Blob(size=600), threading.Barrier(3, timeout=20)
        blob.hook = lambda offset: barrier.wait()
        assert read(ShardCache(tmp_path, SIZE), blob, threads) == blob.data

    @pytest.mark.parametrize("other", [{"version": "2"}, {"size": SIZE - 1}, {"name": "b"}])
    def test_another_version_is_another_file(self, tmp_path, threads, other):
        cache, old, new = ShardCache(tmp_path, 10 * SIZE), Blob(), Blob(**other)
        assert [read(cache, blob, threads) for blob in (old, new, old)] == [old.data, new.data, old.data]
        assert (old.asked["bytes"], new.asked["bytes"]) == (10, 10)

    def test_the_one_used_longest_ago_goes(self, tmp_path, threads, monkeypatch):
        moment = iter(range(100))
        monkeypatch.setattr(os, "utime", lambda path, set_time=os.utime: set_time(path, (0, next(moment))))
        cache = ShardCache(tmp_path, 2 * SIZE)
        a, b, c = (Blob(name) for name in "abc")
        for blob in (a, b):
            read(cache, blob, threads)
        for blob in (b, a, c):  # a file just fetched is newer than these moments, so b and a are used once more
            read(cache, blob, threads)
        assert len(kept(tmp_path)) == 2
        read(cache, a, threads)
        assert (a.asked["bytes"], b.asked["bytes"]) == (10, 10)
        read(cache, b, threads)
        assert (a.asked["bytes"], b.asked["bytes"]) == (10, 20)

    def test_a_shard_that_is_read_keeps_its_bytes(self, tmp_path, threads):
        cache, a, b = ShardCache(tmp_path, SIZE), Blob("a"), Blob("b")
        with cache.open(a, threads) as file:
            assert file.read(1) == a.data[:1]
            before = kept(tmp_path)
            assert read(cache, b, threads) == b.data
            assert not set(kept(tmp_path)) & set(before)
            assert file.read() == a.data[1:]

    @pytest.mark.parametrize("blob", [Blob(size=SIZE + 1), Blob(version=""), Blob(size=0)])
    def test_what_is_not_kept(self, tmp_path, threads, blob):
        with pytest.raises(NoRoomError):
            ShardCache(tmp_path, SIZE).open(blob, threads)
        assert kept(tmp_path) == []

    def test_what_others_write_counts(self, tmp_path, threads):
        """Two shards are fetched at a time, and there is room for one."""
        first, second = Blob("a"), Blob("b")
        begun, go_on = threading.Event(), threading.Event()
        first.hook = lambda offset: begun.set() or go_on.wait(20)
        cache = ShardCache(tmp_path, 2 * SIZE - 1)
        with ThreadPoolExecutor(1) as other:
            reading = other.submit(read, cache, first, threads)
            assert begun.wait(20)
            with ThreadPoolExecutor(1) as pool, pytest.raises(NoRoomError):
                cache.open(second, pool)
            go_on.set()
            assert reading.result(20) == first.data
        assert read(cache, second, threads) == second.data
        assert len(kept(tmp_path)) == 1

    @pytest.mark.parametrize("size", [0, SIZE - 1])
    def test_a_file_of_another_size_is_fetched_again(self, tmp_path, threads, size):
        cache, blob = ShardCache(tmp_path, SIZE), Blob()
        read(cache, blob, threads)
        os.truncate(tmp_path / kept(tmp_path)[0], size)
        assert read(cache, blob, threads) == blob.data

    @pytest.mark.parametrize("fault", ["an error", "too few bytes"])
    def test_a_fault_leaves_nothing(self, tmp_path, threads, fault):
        blob = Blob()

        def fail(offset):
            if offset == 500:
                blob.data = blob.data[:500]
                if fault == "an error":
                    raise OSError("gone")

        blob.hook = fail
        with pytest.raises(OSError, match=r"gone|a could not be copied"):
            ShardCache(tmp_path, SIZE).open(blob, threads)
        assert kept(tmp_path) == []

    def test_a_full_disk_is_named(self, tmp_path, threads, monkeypatch):
        def fail(*arguments):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "pwrite", fail)
        with pytest.raises(OSError, match="No space left") as caught:
            ShardCache(tmp_path, SIZE).open(Blob(), threads)
        assert str(tmp_path) in str(caught.value.filename)
        assert kept(tmp_path) == []


def read_in_process(folder, data, ready):
    blob = Blob()
    blob.data = data
    ready.wait(20)
    with ThreadPoolExecutor(2) as pool:
        return read(ShardCache(folder, SIZE), blob, pool) == data, blob.asked["bytes"]


class TestProcesses:
    def test_one_fetches_and_the_others_wait(self, tmp_path):
        ready = multiprocessing.get_context("fork").Barrier(3)
        found = in_children("fork", read_in_process, *[(tmp_path, os.urandom(SIZE), ready)] * 3)
        assert sorted(found) == [(True, 0), (True, 0), (True, 10)]
        assert len(kept(tmp_path)) == 1

    def test_a_kill_leaves_no_broken_file(self, tmp_path, threads):
        blob = Blob()

        def fetch_and_die():
            blob.hook = lambda offset: offset == 500 and os.kill(os.getpid(), signal.SIGKILL)
            with ThreadPoolExecutor(1) as pool:
                ShardCache(tmp_path, SIZE).open(blob, pool)

        child = multiprocessing.get_context("fork").Process(target=fetch_and_die)
        child.start()
        child.join(20)
        assert child.exitcode == -signal.SIGKILL
        assert not [name for name in kept(tmp_path) if name.endswith(".shard")]
        assert read(ShardCache(tmp_path, SIZE), blob, threads) == blob.data
        assert [Path(name).suffix for name in kept(tmp_path)] == [".shard"]


class TestReadShards:
    @pytest.mark.parametrize("cache_bytes", [10**8, 700_000, 1000], ids=["all fit", "some fit", "none fits"])
    def test_the_same_samples(self, shards, tmp_path, cache_bytes):
        expected = samples(lk.read_shards(shards, shuffle=4))
        with course.serve_folder(shards) as url:
            options = {"shuffle": 4, "verify": True, "cache": ShardCache(tmp_path / "kept", cache_bytes)}
            for reads_in_flight in (1, 3):
                dataset = lk.read_shards(url, reads_in_flight=reads_in_flight, **options)
                for _ in range(2):
                    assert samples(dataset) == expected
        found = list((tmp_path / "kept").glob("*")) if (tmp_path / "kept").exists() else []
        assert sum(path.stat().st_size for path in found) <= cache_bytes
        assert (len(found) == 5) == (cache_bytes == 10**8)

    def test_a_second_epoch_fetches_nothing(self, shards, tmp_path, server):
        for path in shards.iterdir():
            server.files[f"/{path.name}"], server.tags[f"/{path.name}"] = path.read_bytes(), '"1"'
        dataset = lk.read_shards(server.url, cache=lk.ShardCache(tmp_path, 10**8))
        first = samples(dataset)
        server.asked.clear()
        assert samples(dataset) == first
        assert {asked for _, asked in server.asked} == {"bytes=0-0"}
        assert len(server.asked) == 5

    def test_local_shards_stay_where_they_are(self, shards, tmp_path):
        dataset = lk.read_shards(shards, cache=ShardCache(str(tmp_path / "kept"), 10**8))
        assert samples(dataset) == samples(lk.read_shards(shards))
        assert not (tmp_path / "kept").exists()

    def test_a_missing_shard_is_named(self, shards, tmp_path):
        with course.serve_folder(shards) as url:
            dataset = lk.read_shards([f"{url}shard-000000.tar", f"{url}no.tar"], cache=lk.ShardCache(tmp_path, 10**8))
            found = dataset.samples()
            assert [next(found)["__key__"] for _ in range(3)]
            with pytest.raises(FileNotFoundError, match=r"no\.tar does not exist"):
                next(found)

    def test_a_loop_that_is_left_closes_its_files(self, shards, tmp_path):
        with course.serve_folder(shards) as url:
            reading = ReadAhead(2, {}, ShardCache(tmp_path, 10**8)).files(f"{url}shard-00000{n}.tar" for n in range(5))
            next(reading)
            reading.close()
            assert eventually(
                lambda: not any(str(tmp_path) in path for path in [file.path for file in psutil.Process().open_files()])
            )

    @pytest.mark.parametrize("wrong", [0, 1.5])
    def test_a_wrong_limit(self, tmp_path, wrong):
        with pytest.raises(ValueError, match="max_bytes must be an integer >= 1"):
            ShardCache(tmp_path, wrong)
