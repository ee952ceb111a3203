"""Remote shards: fetched ahead in bounded memory, in order, and damage named."""

import os
import threading
from pathlib import Path

import fsspec
import pytest
from hypothesis import given, settings, strategies as st
from torch.utils.data import ChainDataset, DataLoader

import labkit as lk
from labkit import course
from labkit.data import shards_fetch
from labkit.data.shards_fetch import open_shards
from labkit.errors import TarError
from tests.scripted_server import serve_script
from tests.shards import noisy, samples, write

LONGEST_S = 20  # for what comes at once, if it comes


class HookedFiles(fsspec.AbstractFileSystem):
    """Files in memory. `asked` lists requests for bytes, before `hook(path, start)`."""

    protocol = "hooked"
    cachable = False
    files: dict[str, bytes] = {}  # noqa: RUF012
    asked: list[tuple[str, int]] = []  # noqa: RUF012
    hook = staticmethod(lambda path, start: None)

    def info(self, path, **options):
        if path not in self.files:
            raise FileNotFoundError(path)
        return {"size": len(self.files[path])}

    def cat_file(self, path, start=None, end=None, **options):
        self.asked.append((path, start))
        type(self).hook(path, start)
        return self.files[path][start:end]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(shards_fetch, "CHUNK_BYTES", 50_000)


@pytest.fixture
def chunks_of(monkeypatch):
    return lambda n_bytes: monkeypatch.setattr(shards_fetch, "CHUNK_BYTES", n_bytes)


@pytest.fixture
def remote(monkeypatch):
    """Files behind `hooked://`, and what was asked of them."""
    fsspec.register_implementation("hooked", HookedFiles, clobber=True)
    monkeypatch.setattr(HookedFiles, "files", {})
    monkeypatch.setattr(HookedFiles, "asked", [])
    monkeypatch.setattr(HookedFiles, "hook", staticmethod(HookedFiles.hook))
    return HookedFiles


def put(remote, sizes) -> list[str]:
    remote.files.update({f"{number}.tar": os.urandom(size) for number, size in enumerate(sizes)})
    return [f"hooked://{number}.tar" for number in range(len(sizes))]


def read_all(urls, reads_in_flight=1) -> list[bytes]:
    return [file.read() for file in open_shards(urls, reads_in_flight, {})]


# Fetched ahead


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=8), st.integers(1, 5), st.integers(1, 20))
def test_bytes_come_in_order_for_any_sizes(sizes, reads_in_flight, chunk_bytes):
    fsspec.register_implementation("hooked", HookedFiles, clobber=True)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(HookedFiles, "files", {})
        monkeypatch.setattr(shards_fetch, "CHUNK_BYTES", chunk_bytes)
        assert read_all(put(HookedFiles, sizes), reads_in_flight) == list(HookedFiles.files.values())


def test_a_file_is_read_by_parts_and_local_ones_stand_among_remote_ones(remote, chunks_of, tmp_path):
    chunks_of(7)
    (tmp_path / "a.tar").write_bytes(b"local")
    first, last = put(remote, [50, 9])
    parts = [
        [file.read(3), file.read(20), file.read(), file.read()]
        for file in open_shards([first, str(tmp_path / "a.tar"), last], 3, {})
    ]
    assert [b"".join(own) for own in parts] == [remote.files["0.tar"], b"local", remote.files["1.tar"]]
    assert (len(parts[0][0]), len(parts[0][1]), parts[0][3]) == (3, 20, b"")


@pytest.mark.parametrize("sizes", [[40], [10, 20, 5, 5]])
def test_as_many_requests_as_asked_for_run_over_the_ends_of_shards(remote, chunks_of, sizes):
    """No chunk comes before four were asked for."""
    chunks_of(5)
    barrier = threading.Barrier(4, timeout=LONGEST_S)
    remote.hook = staticmethod(lambda path, start: barrier.wait())
    assert read_all(put(remote, sizes), 4) == list(remote.files.values())


@pytest.mark.parametrize("reads_in_flight", [1, 4])
def test_no_more_chunks_are_asked_for_than_stated(remote, chunks_of, reads_in_flight):
    chunks_of(10)
    urls = put(remote, [30, 30, 30])
    order = [(f"{number}.tar", start) for number in range(3) for start in (0, 10, 20)]
    for number, file in enumerate(open_shards(urls, reads_in_flight, {})):
        for n_read in range(3 * number + 1, 3 * number + 4):
            assert file.read(10) == remote.files[f"{number}.tar"][10 * (n_read - 1) % 30 :][:10]
            assert set(order[:n_read]) <= set(remote.asked) <= set(order[: n_read + reads_in_flight])
    assert sorted(remote.asked) == order


def test_one_chunk_is_fetched_ahead_where_nothing_else_is_asked_for(remote, chunks_of):
    chunks_of(10)
    second_begun = threading.Event()
    remote.hook = staticmethod(lambda path, start: start and second_begun.set())
    shards = open_shards(put(remote, [100]), 1, {})
    next(shards).read(1)
    assert second_begun.wait(LONGEST_S)
    assert sorted(start for _, start in remote.asked) == [0, 10]


def test_connections_are_shared(chunks_of):
    chunks_of(10)
    with serve_script() as server:
        server.files.update({f"/{number}.tar": os.urandom(30) for number in range(6)})
        assert read_all([f"{server.url}{path}" for path in server.files], 3) == list(server.files.values())
        assert server.connections <= 3


def test_a_chunk_that_fails_is_an_error_in_its_turn(remote, chunks_of):
    chunks_of(5)

    def fail(path, start):
        if start == 10:
            raise OSError("gone")

    remote.hook = staticmethod(fail)
    for file in open_shards(put(remote, [30]), 1, {}):
        assert len(file.read(10)) == 10
        with pytest.raises(OSError, match=r"0\.tar gave no complete answer"):
            file.read(1)


def test_a_file_that_became_shorter_is_named(remote, chunks_of):
    chunks_of(5)
    for file in open_shards(put(remote, [30]), 1, {}):
        remote.files["0.tar"] = remote.files["0.tar"][:12]
        with pytest.raises(OSError, match=r"0\.tar"):
            file.read()


def test_a_loop_that_is_left_closes_its_file_and_asks_for_no_more(remote, chunks_of):
    chunks_of(10)
    go_on = threading.Event()
    remote.hook = staticmethod(lambda path, start: start and go_on.wait(LONGEST_S))
    shards = open_shards(put(remote, [100, 100]), 3, {})
    file = next(shards)
    file.read(10)
    shards.close()
    go_on.set()
    for thread in threading.enumerate():
        if thread.name.startswith("labkit-shards"):
            thread.join(LONGEST_S)
    assert len(remote.asked) <= 4
    with pytest.raises(ValueError, match="closed"):
        file.read()


# Read as a data set


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """Fourteen pictures in five shards, and a cut one beside them."""
    root = write(noisy(14), tmp_path_factory.mktemp("shards") / "set", max_count=3)
    whole = (root / "shard-000000.tar").read_bytes()
    (root / "cut.tar").write_bytes(whole[: len(whole) * 2 // 3])
    return root


@pytest.fixture(scope="module")
def http(shards):
    with course.serve_folder(shards) as url:
        yield url


@pytest.fixture(scope="module")
def s3(shards):
    pytest.importorskip("s3fs", reason='s3fs is not installed: python -m pip install -e ".[s3]"')
    with course.serve_s3({"photos": shards}) as storage_options:
        yield storage_options


def sums(loader) -> list[tuple[int, int]]:
    return [(int(image.long().sum()), int(label)) for image, label in loader]


@pytest.fixture(scope="module")
def expected(shards) -> list[tuple[int, int]]:
    found = sums(lk.read_shards(shards))
    assert len(set(found)) == 14
    return found


def test_braces_in_a_url_stand_for_shards(http, expected):
    assert sums(lk.read_shards(f"{http}shard-{{000000..000004}}.tar")) == expected


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("reads_in_flight", [1, 4])
def test_the_same_samples_come_in_the_same_order(shards, http, shuffle, reads_in_flight):
    far = lk.read_shards(http, shuffle=shuffle, shuffle_buffer=8, verify=True, reads_in_flight=reads_in_flight)
    expected = samples(lk.read_shards(shards, shuffle=shuffle, shuffle_buffer=8))
    assert [samples(far), samples(far)] == [expected] * 2


@pytest.mark.parametrize("options", [{}, {"shuffle": True, "shuffle_buffer": 5}, {"samples_per_rank": 9}])
def test_a_resume_in_mid_epoch_goes_on(shards, http, options):
    stopped, resumed = (lk.read_shards(http, **options, reads_in_flight=3) for _ in range(2))
    begun = iter(stopped)
    first = sums(next(begun) for _ in range(5))
    resumed.load_state_dict(stopped.state_dict())
    assert first + sums(resumed) == sums(lk.read_shards(shards, **options))


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_open_connections_of_their_own(http, s3, expected, method):
    far = [lk.read_shards(http, reads_in_flight=3), lk.read_shards("s3://photos", storage_options=s3)]
    both = ChainDataset(far)
    assert sums(both) == 2 * expected  # this process has connections now, which workers must not use
    assert sums(DataLoader(both, batch_size=None, num_workers=1, multiprocessing_context=method)) == 2 * expected
    two = DataLoader(far[0], batch_size=None, num_workers=2, multiprocessing_context=method)
    assert sorted(sums(two)) == sorted(expected)


def test_a_cut_shard_is_named(http, s3):
    for url, options in ((http, {}), ("s3://photos/", s3)):
        came = []
        with pytest.raises(TarError, match="cut or damaged") as failure:
            came.extend(lk.read_shards(f"{url}cut.tar", storage_options=options))
        assert f"{url}cut.tar" in str(failure.value)
        assert len(came) in (1, 2)


def test_what_is_not_there_is_named(http, s3):
    """Without credentials, which tests/hardening/test_credentials.py sees to."""
    for url in (f"{http}no.tar", f"{http}no/folder/"):
        with pytest.raises(FileNotFoundError, match=r"no.*does not exist"):
            list(lk.read_shards(url))
    with pytest.raises(FileNotFoundError, match=r"photos/no\.tar"):
        list(lk.read_shards("s3://photos/no.tar", storage_options=s3))
