"""The right kind of blob for a path or URL."""

import os
from pathlib import Path
from typing import Any

from labkit.data.blobs.base import Blob
from labkit.data.blobs.local import LocalBlob


def is_url(place: str | os.PathLike) -> bool:
    """Whether a place is a URL rather than a path; `file://` counts as a URL."""
    return "://" in os.fspath(place)


def is_http_url(place: str | os.PathLike) -> bool:
    """Whether a place is an HTTP or HTTPS URL."""
    return os.fspath(place).startswith(("http://", "https://"))


def refuse_storage_options(place: str | os.PathLike, storage_options: dict[str, Any]) -> None:
    """Raise TypeError for options, such as misspelt ones, of a place that takes none."""
    if storage_options and (is_http_url(place) or not is_url(place)):
        raise TypeError(f"unexpected {', '.join(storage_options)}: only object storage takes options")


def open_blob(place: str | os.PathLike, **storage_options: Any) -> Blob:
    """The blob at a path or URL: urllib3 reads HTTP, fsspec every other scheme."""
    if not is_url(place):
        return LocalBlob(Path(place))
    if is_http_url(place):
        from labkit.data.blobs.http import HttpBlob  # urllib3 is loaded only when a URL needs it

        return HttpBlob(os.fspath(place))
    from labkit.data.blobs.objects import ObjectBlob

    return ObjectBlob(os.fspath(place), **storage_options)
