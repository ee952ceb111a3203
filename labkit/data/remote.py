"""Image files on an HTTP server or in object storage, and the store that fits a path or URL."""

import json
import math
import os
import re
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from email.utils import mktime_tz, parsedate_tz
from functools import partial
from html.parser import HTMLParser
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urljoin, urlsplit

import numpy as np

from labkit.data.blobs import (
    MISSING,
    HttpClient,
    ObjectClient,
    allow_requests,
    is_http_url,
    is_url,
    refuse_storage_options,
)
from labkit.data.sources import MappingStore, ParquetStore, ShardStore, holds_shards
from labkit.data.stores import FolderStore, ListedStore, Store, images_among, read_bytes
from labkit.data.tar import TarStore
from labkit.data.tar_stream import TAR_SUFFIXES
from labkit.errors import ArgumentError, MissingFileError, MissingKeyError, StorageError, WrongTypeError
from labkit.util.arguments import kind_of, require_path
from labkit.util.files import is_file_key, is_hidden
from labkit.util.redact import strip_credentials
from labkit.util.strings import PackedStrings

_SOURCES = "a folder of images or tars, a .tar, a URL, a mapping of names to bytes or a .parquet"
_HTTP_URL = "a URL, such as 'https://host/photos'"
_FLAT = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss")  # where a name is a text, and no path
_ALMOST_URL = re.compile(r"(https?|s3|gs|az|hf)[:/]|www\.", re.IGNORECASE)
_READS_AHEAD = 32  # of a distant store that is read as a whole: 1,000 images/s from 30 ms away
_MAX_DEPTH = 32  # of folders: a link to its own folder would lead deeper without end
_MAX_LISTING_BYTES = 1 << 28
_NAME_FILES = "name the files, HttpStore(url, keys=[...])"
# Compressed tars too: TarStore's error says how to convert one.
_TAR_NAME = re.compile(r"\.(tar(\.\w+)?|t[gbx]z2?|zip|7z|rar)$", re.IGNORECASE)


Result = TypeVar("Result")


class HttpStore(ListedStore):
    r"""Image files under one URL.

    Args:
        url: `http(s)://host/folder`. For a `.tar` at a URL use `TarStore(url)`: it reads with range requests.
        keys: Paths below `url`, in the order that `keys()` then has. Default: what the folder's `manifest.json` lists
            (as `make_photos` writes it), else what the server's listing pages link to; these are sorted.
        ignore: Suffixes of files to leave out of what is listed, as for `FolderStore`.
        num_connections: Connections kept open in each process; use as many as there are threads. `reads_in_flight` of
            `BatchLoader` makes it as many.
        retries: Attempts after the first, with growing waits of at most ten seconds.
        timeout_s: Longest wait for a connection, and for the next byte.

    Raises:
        ValueError: not an HTTP URL, or the URL of a tar; or the listing pages link to images that labkit does not
            decode and `ignore` does not name (on the first call of `keys()`).
        FileNotFoundError: the server has no such folder, or lists no images (on the first call of `keys()`).
        OSError: no complete answer after all attempts. No message holds a password or a signed query.

    A server that states too small a length, and sends as much, cannot be told from one with a shorter file; decoding
    such an image fails. A listing page that is cut short goes unnoticed: a manifest, or `keys=`, is safer.

    >>> lk.HttpStore("https://host/photos", keys=["cat/1.jpg"]).read("cat/1.jpg")[:2]
    b'\xff\xd8'

    Taught in: notebooks/08_shard_formats.ipynb
    """

    _if_empty = f"lists no images: {_NAME_FILES}, or store a manifest"

    def __init__(
        self,
        url: str,
        *,
        keys: Iterable[str] | None = None,
        ignore: str | Iterable[str] = (),
        num_connections: int = 8,
        retries: int = 5,
        timeout_s: float = 30.0,
    ):
        url = require_path("url", url, what=_HTTP_URL)
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ArgumentError(f"not an HTTP URL: {strip_credentials(url)!r}")
        if parts.path.lower().endswith(TAR_SUFFIXES):
            raise ArgumentError(f"{strip_credentials(url)} is a tar: open it with TarStore")
        self._url = parts._replace(path=parts.path.rstrip("/") + "/")
        super().__init__(strip_credentials(self._url.geturl()), ignore)
        self._client = HttpClient(num_connections, retries, timeout_s)
        if keys is not None:
            if isinstance(keys, str | bytes) or not isinstance(keys, Iterable):
                raise WrongTypeError(
                    f"keys must be a list of paths below the URL, such as ['cat/1.jpg'], got {keys!r:.100}"
                )
            self._keys, self.sorts_keys = PackedStrings(keys), False
            if twice := [key for key, times in Counter(self._keys).items() if times > 1]:
                raise ArgumentError(f"keys= names {len(twice)} files more than once, the first {twice[0]!r}")

    def allow_requests(self, n_at_once: int) -> None:
        """Keep at least `n_at_once` connections open in each process. Call it before the first read."""
        self._client.allow_requests(n_at_once)

    def read(self, key: str) -> bytes:
        """Contents of one file. Raises KeyError if the server has none."""
        if is_file_key(key):
            answer = self._client.get(self._url_of(key))
            is_listing = urlsplit(answer.geturl() or "").path.endswith("/")  # a folder, to which the server redirected
            if answer.status == 200 and not is_listing:
                return answer.data
        raise MissingKeyError(f"{key!r} is not a file under {self.name}")

    def sizes(self) -> np.ndarray:
        """Bytes of each file, int64, in the order of `keys()`: a request for each, without the file."""
        return np.array([size for size, _ in self._facts()], np.int64)

    def changed_at(self) -> np.ndarray:
        """When each file was last changed, as the server says, in seconds since 1970; NaN where it does not."""
        return np.array([time_s for _, time_s in self._facts()], np.float64)

    def _facts(self) -> list[tuple[int, float]]:
        """Size of each file, and when it was last changed."""
        self.allow_requests(_READS_AHEAD)
        return [answer.result() for answer in _ahead(self._facts_of, self.keys())]

    def _facts_of(self, key: str) -> tuple[int, float]:
        answer = self._client.get(self._url_of(key), 0, 1, with_body=False)
        if answer.status in MISSING or not is_file_key(key):
            raise MissingKeyError(f"{key!r} is not a file under {self.name}")
        total = answer.headers.get("Content-Range", "").rpartition("/")[2]
        if answer.status == 200 and "Content-Encoding" not in answer.headers:  # ranges are not for this server
            total = answer.headers.get("Content-Length", "")
        size = 0 if answer.status == 416 else int(total) if total.isdecimal() else len(self.read(key))
        changed = parsedate_tz(answer.headers.get("Last-Modified", ""))
        return size, float(mktime_tz(changed)) if changed else math.nan

    def _url_of(self, key: str) -> str:
        """It keeps the folder's query, which may hold a signature."""
        return self._url._replace(path=self._url.path + quote(key, errors="surrogateescape")).geturl()

    def _list_keys(self) -> list[str]:
        answer = self._client.get(self._url_of("manifest.json"))
        try:
            listed = [str(row["key"]) for row in json.loads(_text(answer))["photos"]] if answer.status == 200 else []
        except (ValueError, KeyError, TypeError, RecursionError):  # some other program's manifest
            listed = []
        if listed:
            return [key for key in listed if not key.lower().endswith(self._ignore)]
        return list(images_among(self._list_files(), self._ignore, self.name, self._folders))

    def _list_files(self) -> Iterator[str]:
        """Keys of the files and folders that the listing pages link to, each once; hidden ones are left out.

        Raises:
            FileNotFoundError: the server has no such folder.
            OSError: a page cannot be fetched, or folders never end. Half the keys would be worse than none.
        """
        folders, seen = [""], {""}
        top = unquote(self._url.path, errors="surrogateescape")
        while folders:
            folder = folders.pop()
            if folder.count("/") > _MAX_DEPTH:
                raise StorageError(f"{self.name} lists folders without end (a link to its own folder?): {_NAME_FILES}")
            page, parser = self._url_of(folder), _LinkParser()
            answer = self._client.get(page)
            if answer.status in MISSING and not folder:
                raise MissingFileError(
                    f"{self.name} does not exist ({answer.status}): check the URL; "
                    f"if the server has the files and only lists no folders, {_NAME_FILES}"
                )
            if answer.status == 200 and "html" in answer.headers.get("Content-Type", ""):
                try:
                    parser.feed(_text(answer).decode("utf-8", "replace"))
                except AssertionError as error:  # html.parser's answer to some broken markup
                    shown = strip_credentials(page)
                    raise StorageError(f"{shown} is not a readable listing ({error}): {_NAME_FILES}") from error
            for link in parser.links:
                try:
                    target = urlsplit(urljoin(page, link))
                    is_here = (target.hostname, target.port) == (self._url.hostname, self._url.port)
                except ValueError:  # not a URL
                    continue
                path = unquote(target.path, errors="surrogateescape")
                key = path.removeprefix(top)
                is_below = target.scheme in ("http", "https") and is_here and path.startswith(top)
                if not is_below or key in seen or is_hidden(key) or "" in key.rstrip("/").split("/"):
                    continue
                seen.add(key)
                if key.endswith("/"):
                    folders.append(key)
                yield key


def _text(answer: Any) -> bytes:
    """A listing, which some servers compress unasked."""
    if answer.headers.get("Content-Encoding", "").lower() not in ("gzip", "x-gzip", "deflate"):
        return answer.data
    with suppress(zlib.error):
        return zlib.decompressobj(32 + zlib.MAX_WBITS).decompress(answer.data, _MAX_LISTING_BYTES)
    return b""


class _LinkParser(HTMLParser):
    """Collects the targets of links."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.links += [value for name, value in attributes if tag == "a" and name == "href" and value]


class ObjectStore(ListedStore):
    """Image files under a prefix of an object store, or of anything else that fsspec reads.

    Args:
        url: Such as `s3://bucket/prefix` (extra `s3`) or `gs://bucket/prefix`.
        ignore: Suffixes of files to leave out, as for `FolderStore`.
        **storage_options: Passed to fsspec, such as `endpoint_url=` for S3. Default: its configuration and the
            environment.

    Raises:
        ImportError: the scheme's package is missing; names it.
        FileNotFoundError: no image under the prefix, or no such bucket (on the first call of `keys()`).
        ValueError: images that labkit does not decode and `ignore` does not name (on the first call of `keys()`).
        OSError: no complete answer; names the object. Its client decides how often to retry and how long to wait: for
            S3 set `config_kwargs={"read_timeout": 10, "retries": {"max_attempts": 2}}`.

    >>> store = lk.ObjectStore("s3://bucket/photos", anon=True)

    Taught in: notebooks/08_shard_formats.ipynb
    """

    def __init__(self, url: str, *, ignore: str | Iterable[str] = (), **storage_options: Any):
        url = require_path("url", url, what="a URL, such as 's3://bucket/prefix'")
        if not is_url(url):
            raise ArgumentError(f"{url!r} is no URL, such as 's3://bucket/prefix': lk.FolderStore reads folders")
        self._scheme = url.partition("://")[0]
        self._client = ObjectClient(url.rstrip("/"), storage_options)
        super().__init__(self._client.name, ignore)

    def allow_requests(self, n_at_once: int) -> None:
        """Let S3's client keep `n_at_once` connections, unless `config_kwargs` says so. Call it before reading."""
        self._client.allow_requests(n_at_once)

    def read(self, key: str) -> bytes:
        """Contents of one object. Raises KeyError for an unknown one."""
        # An object's name may have empty parts: of `prefix//a.jpg` the key is `/a.jpg`. Others have no such files.
        is_one = is_file_key(key.lstrip("/") if self._scheme in _FLAT else key)
        try:
            if is_one:
                with self._client.open(key) as (filesystem, path):
                    return filesystem.cat_file(path)
        except (FileNotFoundError, IsADirectoryError, ValueError):  # ValueError: NUL, broken UTF-8
            pass
        raise MissingKeyError(f"{key!r} is not a file under {self.name}")

    def sizes(self) -> np.ndarray:
        """Bytes of each object, int64, in the order of `keys()`, as the service lists them.

        Raises:
            KeyError: an object is no longer there.
        """
        sizes = {key: about.get("size") for key, about in self._list().items()}
        if lost := next((key for key in self.keys() if key not in sizes), None):
            raise MissingKeyError(f"{lost!r} is no longer under {self.name}: open the store again")
        known = ((key, sizes[key]) for key in self.keys())
        return np.array([len(self.read(key)) if size is None else size for key, size in known], np.int64)

    def changed_at(self) -> np.ndarray:
        """When each object was last changed, in seconds since 1970, as the service lists it; NaN where it does not."""
        found = self._list()
        return np.array([_seconds_of(found.get(key, {})) for key in self.keys()], np.float64)

    def _list_keys(self) -> list[str]:
        return list(images_among(self._list(), self._ignore, self.name, self._folders))

    def _list(self) -> dict[str, dict[str, Any]]:
        """Names of all objects under the prefix, and what the service tells of them."""
        with self._client.open() as (filesystem, root):
            found = filesystem.find(root, detail=True)
        return {path.removeprefix(root).removeprefix("/"): about for path, about in found.items()}


def _seconds_of(about: dict[str, Any]) -> float:
    """When an object was last changed: each of fsspec's filesystems has a name and a type of its own for it."""
    names = ("LastModified", "last_modified", "updated", "mtime", "created")
    with suppress(StopIteration, TypeError, ValueError):
        time = next(about[name] for name in names if about.get(name) is not None)
        time = datetime.fromisoformat(time) if isinstance(time, str) else time
        return time.timestamp() if isinstance(time, datetime) else float(time)
    return math.nan


def open_store(
    source: Any,
    *,
    ignore: str | Iterable[str] = (),
    image_column: str | None = None,
    label_column: str | None = None,
    **storage_options: Any,
) -> Store:
    """The store that fits a source of images: a place, a mapping, or a Parquet file.

    A folder of images gives a `FolderStore`, a `.tar` anywhere a `TarStore`, another `http(s)://` URL an `HttpStore`,
    and any other scheme that fsspec knows (`s3://bucket/prefix`) an `ObjectStore`. The other kinds are in
    `labkit.data.sources`: a folder of tars, such as WebDataset's shards, gives a `ShardStore`, a mapping of names to
    the bytes of image files a `MappingStore`, and a `.parquet` file a `ParquetStore`. Tars and tables come with their
    labels.

    Whatever takes a store takes these sources, too; it then opens them without options.

    Args:
        source: The source.
        ignore: Suffixes of images to leave out, such as `(".gif", ".avif")`, which labkit does not decode.
        image_column, label_column: Of a Parquet file. Default: its only column of images; its only column of classes,
            or the one named `label`, if there is one.
        **storage_options: Passed to fsspec, for object storage.

    >>> lk.open_store("photos")
    FolderStore('photos', 8 images)

    Raises:
        ValueError: no store reads such a place; says what is accepted. Or a table has no such column, or several that
            may be meant.
        TypeError: options for a source that takes none.
    """
    columns = {"image_column": image_column, "label_column": label_column}
    given = {name: value for name, value in columns.items() if value is not None}
    refuse_storage_options(source if isinstance(source, str | os.PathLike) else "", storage_options)
    if isinstance(source, str | os.PathLike) and os.fspath(source).lower().endswith(".parquet") and not is_url(source):
        return ParquetStore(source, ignore=ignore, **given)
    if given:
        raise WrongTypeError(f"{', '.join(given)} is for a Parquet file, got {kind_of(source)}")
    if isinstance(source, Mapping):
        return MappingStore(source, ignore=ignore)
    place = require_path("the place", source, what=_SOURCES)
    if os.path.isdir(place):
        return ShardStore(place, ignore=ignore) if holds_shards(place) else FolderStore(place, ignore=ignore)
    is_far, is_readable = is_url(place), os.path.isfile(place)
    if is_far:
        import fsspec

        schemes = place.partition("://")[0].split("::")  # as in simplecache::s3://
        is_readable = is_http_url(place) or set(schemes) <= set(fsspec.available_protocols())
    if is_readable and _TAR_NAME.search(urlsplit(place).path if is_far else place):
        return TarStore(place, ignore=ignore, **storage_options)
    if is_readable and is_http_url(place):
        return HttpStore(place, ignore=ignore)
    if is_readable and is_far:
        return ObjectStore(place, ignore=ignore, **storage_options)
    shown = strip_credentials(place) if is_far else place
    raise ArgumentError(
        f"{shown!r} is not a folder of images or tars, a .tar, a .parquet or a URL of a known scheme: "
        f"{_why_unknown(place)}"
    )


def _why_unknown(place: str) -> str:
    if is_url(place):
        return f"fsspec knows no scheme {place.partition('://')[0]!r}"
    if os.path.exists(place):
        return "it is a file. Name the folder that it lies in; lk.PixelStore(path) opens what lk.PixelStore.build made"
    if "$" in place:
        return "variables are not expanded: pass os.path.expandvars(path)"
    if any(sign in place for sign in "*?["):
        return "wildcards are not expanded: name the folder, and choose some of its images by keys="
    if _ALMOST_URL.match(place):
        return "a URL begins with its scheme and ://, such as https://host/photos"
    return f"it does not exist (looked for in {os.getcwd()}), check the path"


def is_far(store: Any) -> bool:
    """Whether a store of labkit's reads over a network."""
    return isinstance(store, ListedStore) and is_url(store.name) and not store.name.startswith("file:")


def reads_ahead(store: Store, keys: Sequence[str]) -> Iterator[Callable[[], bytes]]:
    """For each key, in order, a function that returns its bytes or raises what `read_bytes` does.

    A distant store is read with 32 requests at a time, since one after the other would mostly wait.
    """
    if not is_far(store):
        yield from (partial(read_bytes, store, key) for key in keys)
        return
    allow_requests(store, _READS_AHEAD)
    for answer in _ahead(partial(read_bytes, store), keys):
        yield answer.result


def _ahead(function: Callable[[str], Result], keys: Iterable[str]) -> Iterator["Future[Result]"]:
    """What a function that sends a request gives for each key, in order, with 32 requests at a time."""
    pool, coming = ThreadPoolExecutor(_READS_AHEAD, "labkit-reads"), deque[Future[Result]]()
    try:
        for key in keys:
            coming.append(pool.submit(function, key))
            if len(coming) == _READS_AHEAD:
                yield coming.popleft()
        while coming:
            yield coming.popleft()
    finally:  # whoever stops reading waits for no more than what was asked for
        pool.shutdown(cancel_futures=True)


def as_store(source: Any) -> Store:
    """`source` itself if it is a store, else the one that `open_store` finds for it.

    Raises:
        WrongTypeError: it is neither; says what is accepted.
    """
    if isinstance(source, Store) and not isinstance(source, type):
        return source
    if isinstance(source, str | os.PathLike | Mapping):
        return open_store(source)
    raise WrongTypeError(
        "images come from a store, which has keys() and read(key), such as lk.FolderStore, or from "
        f"{_SOURCES}, which lk.open_store takes: got {kind_of(source)}{_remedy_for(source)}"
    )


def _remedy_for(source: Any) -> str:
    if isinstance(source, list | tuple):
        return ". Some images of a source are chosen by keys="
    if hasattr(source, "cast_column"):
        return ". torch's loaders, and lk.make_loader, take a Hugging Face data set itself"
    if held := [name for name in ("store", "root") if hasattr(source, name) and not isinstance(source, type)]:
        return f". Pass what it reads, its `{held[0]}`"
    return ""
