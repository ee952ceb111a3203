"""A local cache of shards: whole files or none, within a limit, for several processes, never taken from a reader."""

import multiprocessing
import os
import signal
from collections import Counter
from pathlib import Path

import psutil
import pytest

import labkit as lk
from labkit import course
from labkit.data import shard_cache as cache_module
from labkit.data.shard_cache import ShardCache, open_shards
from tests.children import in_children
from tests.loaders import eventually
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
def _small_chunks(monkeypatch):
    monkeypatch.setattr(cache_module, "CHUNK_BYTES", 50_000)


def read(cache, blob) -> bytes:
    """As a reader of shards does: from the folder, or from the blob, of which the folder keeps a copy."""
    size, version = blob.fingerprint()
    kept_file = cache.find(blob, size, version)
    if kept_file:
        return kept_file.read_at(0, size)
    return b"".join(cache.keep(blob, size, version, (blob.read_at(at, 100) for at in range(0, size, 100))))


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class TestOneProcess:
    def test_bytes_are_fetched_once(self, tmp_path):
        cache, blob = ShardCache(tmp_path / "new", 10 * SIZE), Blob(size=SIZE - 1)
        assert [read(cache, blob) for _ in range(3)] == [blob.data] * 3
        assert blob.asked == {"size": 3, "bytes": 10}
        assert len(kept(tmp_path / "new")) == 1, "no lock and no part of a file is left"

    @pytest.mark.parametrize("other", [{"version": "2"}, {"size": SIZE - 1}, {"name": "b"}])
    def test_another_version_is_another_file(self, tmp_path, other):
        cache, old, new = ShardCache(tmp_path, 10 * SIZE), Blob(), Blob(**other)
        assert [read(cache, blob) for blob in (old, new, old)] == [old.data, new.data, old.data]
        assert (old.asked["bytes"], new.asked["bytes"]) == (10, 10)

    def test_the_one_used_longest_ago_goes(self, tmp_path, monkeypatch):
        moment = iter(range(100))
        monkeypatch.setattr(os, "utime", lambda path, set_time=os.utime: set_time(path, (0, next(moment))))
        cache = ShardCache(tmp_path, 2 * SIZE)
        a, b, c = (Blob(name) for name in "abc")
        for blob in (a, b):
            read(cache, blob)
        for blob in (b, a, c):  # a file just fetched is newer than these moments, so b and a are used once more
            read(cache, blob)
        assert len(kept(tmp_path)) == 2
        read(cache, a)
        assert (a.asked["bytes"], b.asked["bytes"]) == (10, 10)
        read(cache, b)
        assert (a.asked["bytes"], b.asked["bytes"]) == (10, 20)

    def test_a_shard_that_is_read_keeps_its_bytes(self, tmp_path):
        cache, a, b = ShardCache(tmp_path, SIZE), Blob("a"), Blob("b")
        read(cache, a)
        file, before = cache.find(a, *a.fingerprint()), kept(tmp_path)
        assert read(cache, b) == b.data
        assert not set(kept(tmp_path)) & set(before)
        assert file.read_at(0, SIZE) == a.data

    @pytest.mark.parametrize("blob", [Blob(size=SIZE + 1), Blob(version="")])
    def test_what_is_not_kept(self, tmp_path, blob):
        cache = ShardCache(tmp_path, SIZE)
        assert [read(cache, blob) for _ in range(2)] == [blob.data] * 2
        assert kept(tmp_path) == []

    def test_what_others_write_counts(self, tmp_path):
        """Two shards are fetched at a time, and there is room for one."""
        cache, first, second = ShardCache(tmp_path, 2 * SIZE - 1), Blob("a"), Blob("b")
        writing = cache.keep(first, SIZE, "1", (first.read_at(at, 100) for at in range(0, SIZE, 100)))
        begun = next(writing)
        assert read(cache, second) == second.data
        assert begun + b"".join(writing) == first.data
        assert len(kept(tmp_path)) == 1
        assert read(cache, second) == second.data
        assert len(kept(tmp_path)) == 1
        assert (first.asked["bytes"], second.asked["bytes"]) == (10, 20)

    @pytest.mark.parametrize("size", [0, SIZE - 1])
    def test_a_file_of_another_size_is_fetched_again(self, tmp_path, size):
        cache, blob = ShardCache(tmp_path, SIZE), Blob()
        read(cache, blob)
        os.truncate(tmp_path / kept(tmp_path)[0], size)
        assert [read(cache, blob) for _ in range(2)] == [blob.data] * 2
        assert blob.asked["bytes"] == 20

    def test_a_fault_or_a_reader_that_leaves_keeps_nothing(self, tmp_path):
        blob, cache = Blob(), ShardCache(tmp_path, SIZE)

        def fail(offset):
            if offset == 500:
                raise OSError("gone")

        blob.hook = fail
        with pytest.raises(OSError, match="gone"):
            read(cache, blob)
        assert kept(tmp_path) == []
        left = cache.keep(blob, SIZE, "1", (blob.data[at : at + 100] for at in range(0, SIZE, 100)))
        next(left)
        left.close()
        assert kept(tmp_path) == []

    def test_a_full_disk_is_named(self, tmp_path, monkeypatch):
        def fail(*arguments):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="No space left") as caught:
            read(ShardCache(tmp_path, SIZE), Blob())
        assert str(tmp_path) in str(caught.value.filename)
        assert kept(tmp_path) == []


def read_in_process(folder, data, ready):
    blob = Blob()
    blob.data = data
    ready.wait(20)
    return read(ShardCache(folder, 3 * SIZE), blob) == data


class TestProcesses:
    def test_three_that_fetch_the_same_keep_it_once(self, tmp_path):
        ready = multiprocessing.get_context("fork").Barrier(3)
        assert in_children("fork", read_in_process, *[(tmp_path, os.urandom(SIZE), ready)] * 3) == [True] * 3
        assert len(kept(tmp_path)) == 1

    def test_a_kill_leaves_no_broken_file(self, tmp_path):
        blob = Blob()

        def fetch_and_die():
            blob.hook = lambda offset: offset == 500 and os.kill(os.getpid(), signal.SIGKILL)
            read(ShardCache(tmp_path, SIZE), blob)

        child = multiprocessing.get_context("fork").Process(target=fetch_and_die)
        child.start()
        child.join(20)
        assert child.exitcode == -signal.SIGKILL
        assert not [name for name in kept(tmp_path) if name.endswith(".shard")]
        assert read(ShardCache(tmp_path, SIZE), blob) == blob.data
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
            urls = [f"{url}shard-00000{number}.tar" for number in range(5)]
            for reading in (open_shards(urls, 2, {}, ShardCache(tmp_path, 10**8)) for _ in range(2)):
                next(reading).read()
                reading.close()
            assert eventually(
                lambda: not any(str(tmp_path) in path for path in [file.path for file in psutil.Process().open_files()])
            )

    @pytest.mark.parametrize("wrong", [0, 1.5])
    def test_a_wrong_limit(self, tmp_path, wrong):
        with pytest.raises(ValueError, match="max_bytes must be an integer >= 1"):
            ShardCache(tmp_path, wrong)
