"""Remote shards: fetched ahead in bounded memory, kept whole in a local folder or not at all, and damage named."""

import io
import itertools
import multiprocessing
import os
import signal
import tarfile
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import fsspec
import psutil
import pytest
import webdataset as wds
from hypothesis import HealthCheck, example, given, settings, strategies as st
from torch.utils.data import ChainDataset, DataLoader
from webdataset import gopen as wds_gopen
from webdataset.gopen import gopen_schemes

import labkit as lk
from labkit import course
from labkit.data import shard_cache
from labkit.data.shard_cache import open_shards, register
from labkit.errors import TarError
from tests.children import in_children
from tests.scripted_server import serve_script
from tests.shards import noisy, samples, write

LONGEST_S = 20  # for what comes at once, if it comes


class HookedFiles(fsspec.AbstractFileSystem):
    """Files in memory. `asked` lists requests for bytes, before `hook(path, start)`; `looked_for` those for sizes."""

    protocol = "hooked"
    cachable = False
    files: dict[str, bytes] = {}  # noqa: RUF012
    versions: dict[str, str] = {}  # noqa: RUF012
    asked: list[tuple[str, int]] = []  # noqa: RUF012
    looked_for: list[str] = []  # noqa: RUF012
    hook = staticmethod(lambda path, start: None)

    def info(self, path, **options):
        self.looked_for.append(path)
        if path not in self.files:
            raise FileNotFoundError(path)
        return {"size": len(self.files[path]), "ETag": self.versions.get(path, "1")}

    def cat_file(self, path, start=None, end=None, **options):
        self.asked.append((path, start))
        type(self).hook(path, start)
        return self.files[path][start:end]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(shard_cache, "CHUNK_BYTES", 50_000)


@pytest.fixture
def chunks_of(monkeypatch):
    return lambda n_bytes: monkeypatch.setattr(shard_cache, "CHUNK_BYTES", n_bytes)


@pytest.fixture
def remote(monkeypatch):
    """Files behind `hooked://`, and what was asked of them."""
    fsspec.register_implementation("hooked", HookedFiles, clobber=True)
    for name in ("files", "versions", "asked", "looked_for"):
        monkeypatch.setattr(HookedFiles, name, type(getattr(HookedFiles, name))())
    monkeypatch.setattr(HookedFiles, "hook", staticmethod(HookedFiles.hook))
    return HookedFiles


def put(remote, sizes) -> list[str]:
    remote.files.update({f"{number}.tar": os.urandom(size) for number, size in enumerate(sizes)})
    return [f"hooked://{number}.tar" for number in range(len(sizes))]


def read_all(urls, reads_in_flight=1, cache=None) -> list[bytes]:
    return [file.read() for file in open_shards(urls, reads_in_flight, {}, cache)]


def join_fetchers():
    for thread in threading.enumerate():
        if thread.name.startswith("labkit-shards"):
            thread.join(LONGEST_S)


# Fetched ahead


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=8), st.integers(1, 5), st.integers(1, 20))
def test_bytes_come_in_order_for_any_sizes(sizes, reads_in_flight, chunk_bytes):
    fsspec.register_implementation("hooked", HookedFiles, clobber=True)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(HookedFiles, "files", {})
        monkeypatch.setattr(shard_cache, "CHUNK_BYTES", chunk_bytes)
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


@pytest.mark.parametrize("sizes", [[40], [5] * 8, [10, 20, 5, 5]])
def test_as_many_requests_as_asked_for_run_at_a_time_over_the_ends_of_shards(remote, chunks_of, sizes):
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


def test_a_missing_shard_is_an_error_in_its_turn(remote, chunks_of):
    chunks_of(5)
    first, last = put(remote, [9, 9])
    shards = open_shards([first, "hooked://none.tar", last], 2, {})
    assert len(next(shards).read()) == 9
    with pytest.raises(FileNotFoundError, match=r"none\.tar"):
        next(shards)
    assert {path for path, _ in remote.asked} == {"0.tar"}, "nothing is fetched behind it"


def test_a_chunk_that_fails_is_an_error_in_its_turn_and_nothing_is_kept(remote, chunks_of, tmp_path):
    chunks_of(5)

    def fail(path, start):
        if start == 10:
            raise OSError("gone")

    remote.hook = staticmethod(fail)
    for file in open_shards(put(remote, [30]), 1, {}, lk.ShardCache(tmp_path, 100)):
        assert len(file.read(10)) == 10
        with pytest.raises(OSError, match=r"0\.tar gave no complete answer"):
            file.read(1)
    assert kept(tmp_path) == []


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
    join_fetchers()
    assert len(remote.asked) <= 4
    with pytest.raises(ValueError, match="closed"):
        file.read()


# Kept in a local folder

SIZE = 1000


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def n_asked(remote, path="0.tar") -> int:
    return [asked for asked, _ in remote.asked].count(path)


@pytest.fixture
def three(remote, chunks_of) -> list[str]:
    """The URLs of three files of ten chunks each."""
    chunks_of(100)
    return put(remote, [SIZE] * 3)


def path_in(cache: lk.ShardCache, url: str, size: int, version: str) -> Path:
    return cache.path(SimpleNamespace(name=url), size, version)


ROOM, SIZES = 2000, (600, 900, 1400, 2100)  # for the last there is no room
ACTS = st.sampled_from(["read", "read", "read", "another version", "another size", "no version", "cut in the cache"])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(ACTS, st.integers(0, 3)), max_size=20))
@example([("read", number) for number in (0, 1, 0, 2, 0, 1, 3, 3)])
@example([("read", 0), ("cut in the cache", 0), ("read", 0), ("another size", 0), ("read", 0), ("read", 0)])
@example([("read", 0), ("another size", 0), ("read", 0), ("another version", 0), ("read", 0), ("read", 0)])
@example([("read", 0), ("another version", 0), ("read", 0), ("no version", 0), ("read", 0), ("read", 0)])
def test_what_was_used_last_is_kept_as_it_is_and_fetched_once(remote, tmp_path, acts):
    """Against a model: the bytes on the disk of what is in the cache, from the one used longest ago."""
    cache, versions, model = lk.ShardCache(tempfile.mkdtemp(dir=tmp_path), ROOM), itertools.count(2), {}
    remote.versions.clear()
    urls = put(remote, SIZES)
    for act, number in acts:
        name = f"{number}.tar"
        own = url, size, version = urls[number], len(remote.files[name]), remote.versions.get(name, "1")
        if act == "another version":
            remote.files[name], remote.versions[name] = os.urandom(size), f"{next(versions)}"
        elif act == "no version":
            remote.files[name], remote.versions[name] = os.urandom(size), ""
        elif act == "another size":
            remote.files[name] = os.urandom(size - 1)
        elif act == "cut in the cache" and own in model:
            model[own] //= 2
            path = path_in(cache, *own)
            used_ns = path.stat().st_mtime_ns
            os.truncate(path, model[own])
            os.utime(path, ns=(used_ns, used_ns))
        elif act == "read":
            remote.asked.clear()
            assert read_all([url], 1, cache) == [remote.files[name]]
            is_kept = model.get(own) == size
            assert bool(remote.asked) != is_kept
            if not is_kept and version and size <= ROOM:
                while sum(model.values()) + size > ROOM:
                    model.pop(next(iter(model)))
                model[own] = size
            if own in model:
                model[own] = model.pop(own)  # the one used last, whose time is not set here
            for used_s, each in enumerate([*model][:-1]):
                os.utime(path_in(cache, *each), (used_s, used_s))
        assert kept(cache.folder) == sorted(path_in(cache, *each).name for each in model), "no lock, and no part"


def test_a_shard_that_is_read_keeps_its_bytes(remote, three, tmp_path):
    cache = lk.ShardCache(tmp_path, SIZE)
    read_all(three[:1], 1, cache)
    before = kept(tmp_path)
    for file in open_shards(three[:1], 1, {}, cache):
        begun = file.read(10)
        assert read_all(three[1:2], 1, cache) == [remote.files["1.tar"]]
        assert not set(kept(tmp_path)) & set(before)
        assert begun + file.read() == remote.files["0.tar"]
    assert n_asked(remote) == 10


def test_what_others_write_counts(remote, three, tmp_path):
    """Two shards are fetched at a time, and there is room for one."""
    cache = lk.ShardCache(tmp_path, 2 * SIZE - 1)
    for file in open_shards(three[:1], 1, {}, cache):
        begun = file.read(1)
        assert read_all(three[1:2], 1, cache) == [remote.files["1.tar"]]
        assert begun + file.read() == remote.files["0.tar"]
    assert len(kept(tmp_path)) == 1
    assert read_all(three[1:2], 1, cache) == [remote.files["1.tar"]]
    assert len(kept(tmp_path)) == 1
    assert (n_asked(remote, "0.tar"), n_asked(remote, "1.tar")) == (10, 20)


def test_a_reader_that_leaves_keeps_nothing(three, tmp_path):
    left = open_shards(three[:1], 1, {}, lk.ShardCache(tmp_path, SIZE))
    next(left).read(1)
    assert [Path(name).suffix for name in kept(tmp_path)] == [".partial"]
    left.close()
    assert kept(tmp_path) == []


def test_a_full_disk_is_named(three, tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left") as caught:
        read_all(three[:1], 1, lk.ShardCache(tmp_path, SIZE))
    assert str(tmp_path) in str(caught.value.filename)
    assert kept(tmp_path) == []


@pytest.mark.parametrize("wrong", [0, 1.5])
def test_a_wrong_limit_is_refused(tmp_path, wrong):
    with pytest.raises(ValueError, match="max_bytes must be an integer >= 1"):
        lk.ShardCache(tmp_path, wrong)


def test_three_processes_that_fetch_the_same_keep_it_once(remote, three, tmp_path):
    ready = multiprocessing.get_context("fork").Barrier(3)

    def read():
        ready.wait(LONGEST_S)
        return read_all(three[:1], 1, lk.ShardCache(tmp_path, 3 * SIZE)) == [remote.files["0.tar"]]

    assert in_children("fork", read, (), (), ()) == [True] * 3
    assert len(kept(tmp_path)) == 1


def test_a_kill_leaves_no_broken_file(remote, three, tmp_path):
    def fetch_and_die():
        remote.hook = staticmethod(lambda path, start: start == 500 and os.kill(os.getpid(), signal.SIGKILL))
        read_all(three[:1], 1, lk.ShardCache(tmp_path, SIZE))

    child = multiprocessing.get_context("fork").Process(target=fetch_and_die)
    child.start()
    child.join(LONGEST_S)
    assert child.exitcode == -signal.SIGKILL
    assert not [name for name in kept(tmp_path) if name.endswith(".shard")]
    assert read_all(three[:1], 1, lk.ShardCache(tmp_path, SIZE)) == [remote.files["0.tar"]]
    assert [Path(name).suffix for name in kept(tmp_path)] == [".shard"]


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


@pytest.fixture
def s3_by_environment(s3, monkeypatch) -> None:
    for name, option in {"ENDPOINT_URL": "endpoint_url", "ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret"}.items():
        monkeypatch.setenv(f"AWS_{name}", s3[option])


def sums(loader) -> list[tuple[int, int]]:
    return [(int(image.long().sum()), int(label)) for image, label in loader]


@pytest.fixture(scope="module")
def expected(shards) -> list[tuple[int, int]]:
    found = sums(lk.read_shards(shards))
    assert len(set(found)) == 14
    return found


def test_braces_in_a_url_stand_for_shards(http, expected):
    assert sums(lk.read_shards(f"{http}shard-{{000000..000004}}.tar")) == expected


def test_s3_gives_the_items_of_the_disk_by_as_many_connections_as_are_asked_for(s3, expected, monkeypatch):
    allowed, allow_requests = set(), shard_cache.allow_requests
    monkeypatch.setattr(shard_cache, "allow_requests", lambda blob, n: allowed.add(n) or allow_requests(blob, n))
    dataset = lk.read_shards("s3://photos", storage_options=s3, verify=True, reads_in_flight=4)
    assert sums(dataset) == expected
    assert dataset.classes is not None
    assert allowed == {1, 4}, "one for the manifest"


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    ("reads_in_flight", "cache_bytes"), [(1, 0), (4, 0), (30, 0), (1, 10**8), (3, 10**8), (3, 200_000), (1, 1000)]
)
def test_the_same_samples_come_in_the_same_order(shards, http, tmp_path, shuffle, reads_in_flight, cache_bytes):
    """However many are in flight, and whether all, some or none find room in a cache."""
    cache = lk.ShardCache(tmp_path, cache_bytes) if cache_bytes else None
    far = lk.read_shards(
        http, shuffle=shuffle, shuffle_buffer=8, verify=True, reads_in_flight=reads_in_flight, cache=cache
    )
    expected = samples(lk.read_shards(shards, shuffle=shuffle, shuffle_buffer=8))
    assert [samples(far), samples(far)] == [expected] * 2
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert sum(sizes) <= cache_bytes
    assert (len(sizes) == 5) == (cache_bytes == 10**8)


def test_local_shards_stay_where_they_are(shards, tmp_path):
    dataset = lk.read_shards(shards, cache=lk.ShardCache(tmp_path / "kept", 10**8))
    assert samples(dataset) == samples(lk.read_shards(shards))
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize("options", [{}, {"shuffle": True, "shuffle_buffer": 5}, {"samples_per_rank": 9}])
def test_a_resume_in_mid_epoch_goes_on(shards, http, tmp_path, options):
    expected = sums(lk.read_shards(shards, **options))
    for far in ({"reads_in_flight": 3}, {"cache": lk.ShardCache(tmp_path, 10**8)}):
        stopped, resumed = (lk.read_shards(http, **options, **far) for _ in range(2))
        begun = iter(stopped)
        first = sums(next(begun) for _ in range(5))
        resumed.load_state_dict(stopped.state_dict())
        assert first + sums(resumed) == expected


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


def test_what_is_not_there_is_named(http, s3, tmp_path):
    """Without credentials, which tests/hardening/test_credentials.py sees to."""
    for url in (f"{http}no.tar", f"{http}no/folder/"):
        with pytest.raises(FileNotFoundError, match=r"no.*does not exist"):
            list(lk.read_shards(url))
    with pytest.raises(FileNotFoundError, match=r"photos/no\.tar"):
        list(lk.read_shards("s3://photos/no.tar", storage_options=s3))
    urls = [f"{http}shard-000000.tar", f"{http}no.tar"]
    cached = lk.read_shards(urls, cache=lk.ShardCache(tmp_path, 10**8)).samples()
    assert all(next(cached)["__key__"] for _ in range(3))
    with pytest.raises(FileNotFoundError, match=r"no\.tar does not exist"):
        next(cached)


def test_a_loop_that_is_left_closes_the_files_of_its_cache(http, tmp_path):
    urls = [f"{http}shard-00000{number}.tar" for number in range(5)]
    for reading in (open_shards(urls, 2, {}, lk.ShardCache(tmp_path, 10**8)) for _ in range(2)):
        next(reading).read()
        reading.close()
    join_fetchers()
    assert not any(str(tmp_path) in file.path for file in psutil.Process().open_files())


# WebDataset itself


def test_webdataset_reads_and_writes_s3(s3_by_environment, shards):
    register()
    far, local = (
        [sample["jpg"] for sample in wds.WebDataset(f"{place}/shard-{{000000..000004}}.tar", shardshuffle=False)]
        for place in ("s3://photos", shards)
    )
    assert far == local
    assert len(far) == 14
    with wds.TarWriter("s3://photos/written.tar") as writer:
        writer.write({"__key__": "a", "txt": "hello"})
    with tarfile.open(fileobj=io.BytesIO(*read_all(["s3://photos/written.tar"]))) as tar:
        assert tar.extractfile("a.txt").read() == b"hello"


def test_webdataset_learns_s3_when_shards_are_read_or_on_a_call(shards, monkeypatch):
    for call in (lambda: lk.read_shards(shards), register, lambda: register(0)):
        monkeypatch.delitem(gopen_schemes, "s3", raising=False)
        with pytest.raises(ValueError, match="no gopen handler"):
            wds_gopen("s3://photos/shard-000000.tar")
        call()
        assert callable(gopen_schemes["s3"])
    monkeypatch.setitem(gopen_schemes, "s3", print)
    register()
    assert gopen_schemes["s3"] is print, "an opener that is there stays"
