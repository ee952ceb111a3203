"""Remote shards by many requests at a time: bytes in order, no more in memory than stated, errors in their turn."""

import os
import threading

import fsspec
import pytest
from hypothesis import given, settings, strategies as st
from torch.utils.data import DataLoader

import labkit as lk
from labkit import course
from labkit.data import shard_cache
from labkit.data.shard_cache import open_shards
from tests.loaders import eventually
from tests.shard_samples import samples

_LONGEST_S = 20  # for what comes at once, if it comes


class HookedFiles(fsspec.AbstractFileSystem):
    """Files in memory; `hook(path, start)` is called before bytes are given."""

    protocol = "hooked"
    cachable = False
    files: dict[str, bytes] = {}  # noqa: RUF012
    hook = staticmethod(lambda path, start: None)

    def info(self, path, **options):
        if path not in self.files:
            raise FileNotFoundError(path)
        return {"size": len(self.files[path]), "ETag": str(hash(self.files[path]))}

    def cat_file(self, path, start=None, end=None, **options):
        type(self).hook(path, start)
        return self.files[path][start:end]


@pytest.fixture
def remote(monkeypatch):
    """Files behind `hooked://`, and what was asked of them."""
    fsspec.register_implementation("hooked", HookedFiles, clobber=True)
    monkeypatch.setattr(HookedFiles, "files", {})
    monkeypatch.setattr(HookedFiles, "hook", staticmethod(lambda path, start: None))
    return HookedFiles


def put(remote, sizes) -> list[str]:
    remote.files.update({f"{number}.tar": os.urandom(size) for number, size in enumerate(sizes)})
    return [f"hooked://{number}.tar" for number in range(len(sizes))]


@pytest.fixture
def chunks_of(monkeypatch):
    return lambda n_bytes: monkeypatch.setattr(shard_cache, "CHUNK_BYTES", n_bytes)


def read_all(urls, reads_in_flight):
    return [file.read() for file in open_shards(urls, reads_in_flight, {})]


class TestBytes:
    @settings(max_examples=30, deadline=None)
    @given(st.lists(st.integers(0, 40), max_size=8), st.integers(1, 5), st.integers(1, 20))
    def test_in_order_for_any_sizes(self, sizes, reads_in_flight, chunk_bytes):
        fsspec.register_implementation("hooked", HookedFiles, clobber=True)
        urls = put(HookedFiles, sizes)
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(shard_cache, "CHUNK_BYTES", chunk_bytes)
            found = read_all(urls, reads_in_flight)
        assert found == [HookedFiles.files[f"{number}.tar"] for number in range(len(sizes))]

    def test_by_parts(self, remote, chunks_of):
        chunks_of(7)
        (url,) = put(remote, [50])
        [found] = [(file.read(3) + file.read(20) + file.read(), file.read()) for file in open_shards([url], 1, {})]
        assert found == (remote.files["0.tar"], b"")

    def test_local_ones_among_them(self, remote, chunks_of, tmp_path):
        chunks_of(4)
        (tmp_path / "a.tar").write_bytes(b"local")
        first, last = put(remote, [9, 9])
        urls = [first, str(tmp_path / "a.tar"), last]
        assert read_all(urls, 3) == [remote.files["0.tar"], b"local", remote.files["1.tar"]]


class TestInFlight:
    @pytest.mark.parametrize("sizes", [[40], [5] * 8, [10, 20, 5, 5]])
    def test_as_many_as_asked_for_over_the_ends_of_shards(self, remote, chunks_of, sizes):
        """No chunk comes before four were asked for."""
        chunks_of(5)
        barrier = threading.Barrier(4, timeout=_LONGEST_S)
        remote.hook = staticmethod(lambda path, start: barrier.wait())
        urls = put(remote, sizes)
        assert read_all(urls, 4) == [remote.files[f"{number}.tar"] for number in range(len(sizes))]

    def test_no_more_chunks_than_stated(self, remote, chunks_of):
        chunks_of(10)
        asked = []
        remote.hook = staticmethod(lambda path, start: asked.append((path, start)))
        urls = put(remote, [30, 30, 30])
        order = [(f"{number}.tar", start) for number in range(3) for start in (0, 10, 20)]
        for number, file in enumerate(open_shards(urls, 4, {})):
            for n_read in range(3 * number + 1, 3 * number + 4):
                assert file.read(10) == remote.files[f"{number}.tar"][10 * (n_read - 1) % 30 :][:10]
                assert set(order[:n_read]) <= set(asked) <= set(order[: n_read + 4])
        assert sorted(asked) == order

    def test_one_chunk_ahead_where_nothing_else_is_asked_for(self, remote, chunks_of):
        chunks_of(10)
        asked = []
        remote.hook = staticmethod(lambda path, start: asked.append(start))
        shards = open_shards(put(remote, [100]), 1, {})
        next(shards).read(1)
        assert eventually(lambda: len(asked) == 2, _LONGEST_S)
        assert sorted(asked) == [0, 10]

    def test_connections_are_shared(self, server, chunks_of):
        chunks_of(10)
        for number in range(6):
            server.files[f"/{number}.tar"] = os.urandom(30)
        urls = [f"{server.url}/{number}.tar" for number in range(6)]
        assert read_all(urls, 3) == list(server.files.values())
        assert server.connections <= 3


class TestErrors:
    def test_a_missing_shard_in_its_turn(self, remote, chunks_of):
        chunks_of(5)
        urls = put(remote, [9, 9])
        asked = []
        remote.hook = staticmethod(lambda path, start: asked.append(path))
        shards = open_shards([urls[0], "hooked://none.tar", urls[1]], 2, {})
        assert len(next(shards).read()) == 9
        with pytest.raises(FileNotFoundError, match=r"none\.tar"):
            next(shards)
        assert set(asked) == {"0.tar"}, "nothing is fetched behind it"

    def test_a_chunk_that_fails(self, remote, chunks_of):
        chunks_of(5)

        def fail(path, start):
            if start == 10:
                raise OSError("gone")

        remote.hook = staticmethod(fail)
        for file in open_shards(put(remote, [30]), 1, {}):
            assert len(file.read(10)) == 10
            with pytest.raises(OSError, match=r"0\.tar gave no complete answer"):
                file.read(1)

    def test_a_file_that_became_shorter(self, remote, chunks_of):
        chunks_of(5)
        for file in open_shards(put(remote, [30]), 1, {}):
            remote.files["0.tar"] = remote.files["0.tar"][:12]
            with pytest.raises(OSError, match=r"0\.tar"):
                file.read()

    def test_a_file_whose_loop_was_left_is_closed(self, remote):
        shards = open_shards(put(remote, [30]), 2, {})
        file = next(shards)
        shards.close()
        with pytest.raises(ValueError, match="closed"):
            file.read()

    def test_a_loop_that_is_left_asks_for_no_more(self, remote, chunks_of):
        chunks_of(10)
        asked, go_on = [], threading.Event()

        def wait(path, start):
            asked.append(start)
            if start:
                go_on.wait(_LONGEST_S)

        remote.hook = staticmethod(wait)
        shards = open_shards(put(remote, [100, 100]), 3, {})
        next(shards).read(10)
        shards.close()
        go_on.set()
        for thread in threading.enumerate():
            if thread.name.startswith("labkit-shards"):
                thread.join(_LONGEST_S)
        assert len(asked) <= 4


class TestReadShards:
    @pytest.mark.parametrize("reads_in_flight", [1, 4, 30])
    @pytest.mark.parametrize("shuffle", [0, 8])
    def test_the_same_samples_in_the_same_order(self, shards, reads_in_flight, shuffle, chunks_of):
        chunks_of(50_000)
        with course.serve_folder(shards) as url:
            far = lk.read_shards(url, shuffle=shuffle, verify=True, reads_in_flight=reads_in_flight)
            assert samples(far) == samples(lk.read_shards(shards, shuffle=shuffle))

    @pytest.mark.parametrize("options", [{}, {"shuffle": 5}, {"samples_per_rank": 9}])
    def test_a_resume_in_mid_epoch(self, shards, tmp_path, options):
        def sums(dataset):
            return [int(image.long().sum()) for image, _ in dataset]

        expected = sums(lk.read_shards(shards, **options))
        with course.serve_folder(shards) as url:
            for far in ({"reads_in_flight": 3}, {"cache": lk.ShardCache(tmp_path, 10**8)}):
                stopped, resumed = (lk.read_shards(url, **options, **far) for _ in range(2))
                begun = iter(stopped)
                first = [int(next(begun)[0].long().sum()) for _ in range(5)]
                resumed.load_state_dict(stopped.state_dict())
                assert first + sums(resumed) == expected

    def test_in_workers(self, shards):
        with course.serve_folder(shards) as url:
            loaded = DataLoader(lk.read_shards(url, reads_in_flight=3), batch_size=None, num_workers=2)
            expected = DataLoader(lk.read_shards(shards), batch_size=None, num_workers=2)
            sums = [[int(image.long().sum()) for image, _ in loader] for loader in (loaded, expected)]
        assert sums[0] == sums[1]

    def test_from_s3(self, shards, monkeypatch):
        pytest.importorskip("moto.server", reason='moto is not installed: python -m pip install -e ".[test]"')
        allowed, allow_requests = set(), shard_cache.allow_requests
        monkeypatch.setattr(shard_cache, "allow_requests", lambda blob, n: allowed.add(n) or allow_requests(blob, n))
        with course.serve_s3({"photos": shards}) as options:
            far = lk.read_shards("s3://photos", storage_options=options, reads_in_flight=4)
            assert samples(far) == samples(lk.read_shards(shards))
        assert allowed == {1, 4}, "one for the manifest"

    def test_a_wrong_number(self, shards):
        with pytest.raises(ValueError, match="reads_in_flight must be an integer >= 1, got 0"):
            lk.read_shards(shards, reads_in_flight=0)
