"""Object storage through fsspec: one filesystem per process, and errors that name the object but no secret."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from labkit.core import PerProcess, contains_secret, install_command, redact, strip_credentials

_PASSED_ON = (FileNotFoundError, IsADirectoryError, ValueError, ImportError)  # callers tell these apart

_BOTOCORE_CONNECTIONS = 10  # botocore.endpoint.MAX_POOL_CONNECTIONS


class ObjectClient:
    """fsspec's filesystem for one URL, opened on first use in each process. `name` is the URL without credentials."""

    def __init__(self, url: str, storage_options: dict[str, Any]):
        self.name = strip_credentials(url)
        self._secrets = _find_secrets(storage_options)
        self._url, self._is_s3 = url, url.startswith(("s3://", "s3a://"))
        # With more, s3fs asks for the size of each object, by a request of its own, before it reads it.
        self._options = {**({"max_concurrency": 1} if self._is_s3 else {}), **storage_options}
        self._filesystem = PerProcess(partial(_open_filesystem, url, self._options))

    def allow_requests(self, n_at_once: int) -> None:
        """Let S3's client keep so many connections, unless its options say how many; botocore's default is 10.

        Other clients bound them otherwise, if at all: gcsfs by aiohttp's 100.
        """
        settings = {"max_pool_connections": n_at_once, **self._options.get("config_kwargs", {})}
        if n_at_once > _BOTOCORE_CONNECTIONS and self._is_s3:
            self._filesystem = PerProcess(
                partial(_open_filesystem, self._url, {**self._options, "config_kwargs": settings})
            )

    @contextmanager
    def open(self, key: str = "") -> Iterator[tuple[Any, str]]:
        """The filesystem, and the path in it of the URL, or of `key` below it.

        Every client has error classes of its own: inside the block they become OSError, which names the object and
        reveals no secret.
        """
        name = f"{self.name}/{key}" if key else self.name
        try:
            filesystem, path = self._filesystem()
            yield filesystem, f"{path}/{key}" if key else path
        except _PASSED_ON as error:
            if not contains_secret(error, self._secrets):
                raise
            kind = next(kind for kind in _PASSED_ON if isinstance(error, kind))
            raise kind(redact(str(error), self._secrets)) from None
        except PermissionError:
            raise PermissionError(f"{name}: access denied; check the credentials and what they allow") from None
        except Exception as error:
            cause = redact(str(getattr(error, "strerror", None) or type(error).__name__), self._secrets)
            raise OSError(
                f"{name} gave no complete answer ({cause}): check the server and the network, then run again"
            ) from None  # the chained text may hold a whole URL


def known_schemes() -> set[str]:
    """URL schemes that a store can be opened for; some need an extra package."""
    import fsspec

    return {"http", "https", *fsspec.available_protocols()}


def _open_filesystem(url: str, storage_options: dict[str, Any]) -> tuple[Any, str]:
    import fsspec

    try:
        return fsspec.core.url_to_fs(url, **storage_options)
    except ImportError as error:
        scheme = url.partition("://")[0]
        raise ImportError(f"{scheme}:// needs a package ({error}); for S3: {install_command('s3')}") from error


def _find_secrets(storage_options: dict[str, Any]) -> tuple[str, ...]:
    """Secret values in the options and the environment."""
    settings = [(name, value) for name, value in os.environ.items() if name.startswith("AWS_")]
    for name, value in storage_options.items():
        settings += value.items() if isinstance(value, dict) else [(name, value)]
    is_secret = re.compile("secret|token|pass", re.IGNORECASE).search
    return tuple(value for name, value in settings if isinstance(value, str) and value and is_secret(name))
