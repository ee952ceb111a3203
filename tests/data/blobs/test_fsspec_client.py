"""Object storage that fails: errors name the object, and keep its secrets."""

import sys

import fsspec
import pytest

from labkit import ObjectStore, TarStore
from labkit.data.blobs import ObjectBlob


class ClientError(Exception):
    """Not an OSError, like those of botocore and aiohttp."""


class FailingFilesystem(fsspec.AbstractFileSystem):
    """An object store whose client raises errors of its own classes, or sends other bytes than were asked for."""

    protocol = "failing"
    cachable = False

    def cat_file(self, path, start=None, end=None, **options):
        if "error" in self.storage_options:
            raise self.storage_options["error"]
        return bytes(self.storage_options["n_bytes"])

    def info(self, path, **options):
        return {"size": len(self.cat_file(path)) and 100}

    find = info


@pytest.fixture(autouse=True)
def _failing_scheme():
    fsspec.register_implementation("failing", FailingFilesystem, clobber=True)


@pytest.mark.parametrize(
    ("options", "n_at_once", "expected"),
    [
        ({}, 64, {"max_pool_connections": 64}),
        ({}, 10, {}),
        ({"config_kwargs": {"max_pool_connections": 3}}, 64, {"max_pool_connections": 3}),
        ({"config_kwargs": {"read_timeout": 3}}, 64, {"max_pool_connections": 64, "read_timeout": 3}),
    ],
)
def test_connections_of_s3(options, n_at_once, expected):
    pytest.importorskip("s3fs")
    store = ObjectStore("s3://bucket/folder", key="a", **options)
    store.allow_requests(n_at_once)
    filesystem, path = store._client._filesystem()
    assert (filesystem.config_kwargs, path) == (expected, "bucket/folder")


def test_connections_of_other_schemes():
    store = ObjectStore("failing://folder")
    store.allow_requests(64)
    assert store._client._filesystem()[0].storage_options == {}


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ClientError("http://user:secret@host/a?signature"), r"no complete answer \(ClientError\): check the server"),
        (OSError(121, "Internal Server Error"), r"no complete answer \(Internal Server Error\): check the server"),
        (PermissionError("Access Denied"), "access denied; check the credentials"),
    ],
)
def test_an_object_stores_own_errors_name_the_object(error, said):
    store = ObjectStore("failing://bucket/set", error=error)
    blob = ObjectBlob("failing://bucket/set/a.tar", error=error)
    calls = {"set/a.jpg": lambda: store.read("a.jpg"), "set": store.keys, "set/a.tar": blob.fingerprint}
    for name, call in calls.items():
        with pytest.raises(OSError, match=f"failing://bucket/{name}:? .*{said}") as failure:
            call()
        assert "secret" not in str(failure.value)
        assert failure.value.__suppress_context__


@pytest.mark.parametrize("n_bytes", [19, 21])
def test_an_object_of_which_too_much_or_too_little_comes_is_an_error(n_bytes):
    blob = ObjectBlob("failing://bucket/a.tar", n_bytes=n_bytes)
    with pytest.raises(OSError, match=rf"failing://bucket/a\.tar: the server sent {n_bytes} bytes instead of the 20"):
        blob.read_at(80, 30)
    assert blob.read_at(100, 30) == b""


def test_without_s3fs_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    store = ObjectStore("s3://bucket/a")
    for use in (store.keys, lambda: store.read("b"), TarStore("s3://b/a.tar").keys):
        with pytest.raises(ImportError, match=r's3fs.*pip install -e "\.\[s3\]"'):
            use()
