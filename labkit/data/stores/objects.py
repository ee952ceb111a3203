"""Image files in object storage, through fsspec."""

from typing import Any

from labkit.core import is_file_key, is_image
from labkit.data.blobs import ObjectClient
from labkit.data.stores.base import ListedStore


class ObjectStore(ListedStore):
    """Image files under a prefix of an object store, or of anything else that fsspec reads.

    Args:
        url: Such as `s3://bucket/prefix` (extra `s3`) or `gs://bucket/prefix`.
        **storage_options: Passed to fsspec, such as `endpoint_url=` for S3. Default: its configuration and the
            environment.

    Raises:
        ImportError: the scheme's package is missing; names it.
        FileNotFoundError: no image under the prefix (on the first call of `keys()`).
        OSError: no complete answer; names the object. Its client decides how often to retry and how long to wait: for
            S3 set `config_kwargs={"read_timeout": 10, "retries": {"max_attempts": 2}}`.

    Taught in: notebooks/08_shard_formats.ipynb
    """

    def __init__(self, url: str, **storage_options: Any):
        self._client = ObjectClient(url.rstrip("/"), storage_options)
        super().__init__(self._client.name)

    def read(self, key: str) -> bytes:
        """Contents of one object. Raises KeyError for an unknown one."""
        try:
            if is_file_key(key):
                with self._client.open(key) as (filesystem, path):
                    return filesystem.cat_file(path)
        except (FileNotFoundError, IsADirectoryError, ValueError):  # ValueError: NUL, broken UTF-8
            pass
        raise KeyError(f"{key!r} is not a file under {self.name}")

    def _list_keys(self) -> list[str]:
        with self._client.open() as (filesystem, root):
            paths = filesystem.find(root)
        return list(filter(is_image, (path.removeprefix(root).lstrip("/") for path in paths)))
