"""Shards behind a network: the same samples as from the disk, over HTTP and S3, by labkit and by WebDataset itself."""

import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import webdataset as wds
from torch.utils.data import ChainDataset, DataLoader
from webdataset import gopen as wds_gopen
from webdataset.gopen import gopen_schemes

from labkit import FolderStore, read_shards, write_shards
from labkit.course import serve_folder, serve_s3
from labkit.data.shard_cache import open_shards, register
from labkit.errors import TarError


@pytest.fixture(scope="module")
def shards(first_photos, tmp_path_factory) -> Path:
    """Three shards, and a cut one beside them."""
    folder = tmp_path_factory.mktemp("shards")
    root = write_shards(FolderStore(first_photos(14)), folder / "set", max_count=5, engine="threads", progress=False)
    (root / "cut.tar").write_bytes((root / "shard-000000.tar").read_bytes()[:200_000])
    return root


@pytest.fixture(scope="module")
def http(shards):
    with serve_folder(shards) as url:
        yield url


@pytest.fixture(scope="module")
def s3(shards):
    pytest.importorskip("moto.server", reason='moto is not installed: python -m pip install -e ".[test]"')
    with serve_s3({"photos": shards}) as storage_options:
        yield storage_options


@pytest.fixture
def s3_by_environment(s3, monkeypatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3["endpoint_url"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3["secret"])


def sums(loader) -> list[tuple[int, int]]:
    return [(int(image.long().sum()), int(label)) for image, label in loader]


@pytest.fixture(scope="module")
def expected(shards) -> list[tuple[int, int]]:
    found = sums(read_shards(shards))
    assert len(set(found)) == 14
    return found


def test_http(http, expected):
    assert sums(read_shards(http, verify=True)) == expected
    assert sums(read_shards(f"{http}shard-{{000000..000002}}.tar")) == expected


def test_s3(s3, expected):
    dataset = read_shards("s3://photos", storage_options=s3, verify=True)
    assert sums(dataset) == expected
    assert dataset.classes is not None


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_open_connections_of_their_own(http, s3, expected, method):
    both = ChainDataset([read_shards(http), read_shards("s3://photos", storage_options=s3)])
    assert sums(both) == 2 * expected  # this process has connections now, which workers must not use
    loader = DataLoader(both, batch_size=None, num_workers=1, multiprocessing_context=method)
    assert sums(loader) == 2 * expected


def test_webdataset_itself_reads_s3(s3_by_environment, shards):
    register()
    samples = list(wds.WebDataset("s3://photos/shard-{000000..000002}.tar", shardshuffle=False))
    local = list(wds.WebDataset(str(shards / "shard-{000000..000002}.tar"), shardshuffle=False))
    assert [sample["jpg"] for sample in samples] == [sample["jpg"] for sample in local]
    assert len(samples) == 14


def test_webdataset_itself_writes_s3(s3_by_environment):
    register()
    with wds.TarWriter("s3://photos/written.tar") as writer:
        writer.write({"__key__": "a", "txt": "hello"})
    [data] = [file.read() for file in open_shards(["s3://photos/written.tar"], 1, {})]
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert tar.extractfile("a.txt").read() == b"hello"


IMPORTING = """
import sys
import labkit.data.shard_cache, labkit.data.shards_read, labkit.data.shards_write
print([name for name in ("webdataset", "urllib3", "fsspec") if name in sys.modules])
"""


def test_an_import_loads_neither_webdataset_nor_a_client():
    done = subprocess.run([sys.executable, "-c", IMPORTING], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_webdataset_learns_s3_when_shards_are_read_or_on_a_call(shards, monkeypatch):
    for call in (lambda: read_shards(shards), register, lambda: register(0)):
        monkeypatch.delitem(gopen_schemes, "s3", raising=False)
        with pytest.raises(ValueError, match="no gopen handler"):
            wds_gopen("s3://photos/shard-000000.tar")
        call()
        assert callable(gopen_schemes["s3"])
    monkeypatch.setitem(gopen_schemes, "s3", print)
    register()
    assert gopen_schemes["s3"] is print, "an opener that is there stays"


def test_a_cut_shard_is_named(http, s3):
    for url, options in ((http, {}), ("s3://photos/", s3)):
        came = []
        with pytest.raises(TarError, match="cut or damaged") as failure:
            came.extend(read_shards(f"{url}cut.tar", storage_options=options))
        assert f"{url}cut.tar" in str(failure.value)
        assert len(came) in (1, 2)


def test_what_is_not_there_is_named_without_credentials(http, s3):
    secret = http.replace("://", "://user:hush@")
    for url in (f"{secret}no.tar?X-Amz-Signature=hush", f"{secret}no/folder/"):
        with pytest.raises(FileNotFoundError, match="no") as failure:
            list(read_shards(url))
        assert "does not exist" in str(failure.value)
        assert "hush" not in str(failure.value)
    with pytest.raises(FileNotFoundError, match=r"photos/no\.tar"):
        list(read_shards("s3://photos/no.tar", storage_options=s3))
    assert s3["secret"] not in repr(read_shards("s3://photos", storage_options={**s3, "secret": "hush"}).order)
