"""What reading through fsspec needs: the filesystem of an address, its errors as ours, no secret told."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from labkit.core import contains_secret, redact

_TOLD_APART = (FileNotFoundError, IsADirectoryError, ValueError, ImportError)  # by callers


@contextmanager
def translated_errors(name: str, secrets: tuple[str, ...]) -> Iterator[None]:
    """What a client raises as an OSError that names the object, and tells no secret: each has classes of its own."""
    try:
        yield
    except _TOLD_APART as error:
        if not contains_secret(error, secrets):
            raise
        kind = next(kind for kind in _TOLD_APART if isinstance(error, kind))
        raise kind(redact(str(error), secrets)) from None
    except PermissionError:
        raise PermissionError(f"{name} is refused: check the credentials, and what they allow") from None
    except Exception as error:
        cause = redact(str(getattr(error, "strerror", None) or type(error).__name__), secrets)
        raise OSError(
            f"{name} gave no whole answer ({cause}): check the server and the network, then run again"
        ) from None  # the chained text may hold a whole address


def known_schemes() -> set[str]:
    """Schemes of addresses that a store can be opened for; some need a package."""
    import fsspec

    return {"http", "https", *fsspec.available_protocols()}


def open_filesystem(url: str, storage_options: dict[str, Any]) -> tuple[Any, str]:
    import fsspec

    try:
        return fsspec.core.url_to_fs(url, **storage_options)
    except ImportError as error:
        scheme = url.partition("://")[0]
        raise ImportError(f'{scheme}:// needs a package ({error}); for S3: python -m pip install -e ".[s3]"') from error


def known_secrets(storage_options: dict[str, Any]) -> tuple[str, ...]:
    """What options and environment keep secret."""
    named = [(name, value) for name, value in os.environ.items() if name.startswith("AWS_")]
    for name, value in storage_options.items():
        named += value.items() if isinstance(value, dict) else [(name, value)]
    return tuple(
        value for name, value in named if isinstance(value, str) and re.search("(?i)secret|token|pass", name) and value
    )
