"""The right kind of store for a path or URL."""

import os
import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from labkit.core import strip_credentials
from labkit.data.blobs import is_http_url, is_url, known_schemes, refuse_storage_options
from labkit.data.stores.base import FolderStore, Store
from labkit.data.stores.remote import HttpStore, ObjectStore
from labkit.data.tar import TarStore

# Compressed tars too: TarStore's error says how to convert one.
_TAR_NAME = re.compile(r"\.(tar(\.\w+)?|t[gbx]z2?)$", re.IGNORECASE)


def open_store(path_or_url: str | os.PathLike, *, ignore: str | Iterable[str] = (), **storage_options: Any) -> Store:
    """The store that fits a path or URL.

    A folder of images gives a `FolderStore`, a `.tar` anywhere a `TarStore`, another `http(s)://` URL an `HttpStore`,
    and any other scheme that fsspec knows (`s3://bucket/prefix`) an `ObjectStore`.

    Args:
        path_or_url: The place.
        ignore: Suffixes of files to leave out, such as `(".gif", ".bmp")`, which labkit does not decode.
        **storage_options: Passed to fsspec, for object storage.

    Raises:
        ValueError: no store reads such a place; says what is accepted.
        TypeError: options for a place that takes none.
    """
    place = os.fspath(path_or_url)
    refuse_storage_options(place, storage_options)
    if os.path.isdir(place):
        return FolderStore(place, ignore=ignore)
    is_readable = place.partition("://")[0] in known_schemes() if is_url(place) else os.path.isfile(place)
    if is_readable and _TAR_NAME.search(urlsplit(place).path if is_url(place) else place):
        return TarStore(place, ignore=ignore, **storage_options)
    if is_readable and is_url(place):
        return (
            HttpStore(place, ignore=ignore)
            if is_http_url(place)
            else ObjectStore(place, ignore=ignore, **storage_options)
        )
    shown = strip_credentials(place) if is_url(place) else place
    raise ValueError(f"{shown!r} is not a folder of images, a .tar or a URL of a known scheme")
