"""Images in a tar, read without unpacking it."""

import os
import tarfile
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from labkit.core import Lazy, PackedStrings, is_image, require_choice
from labkit.data.blobs import Extent, LocalBlob, evict, is_url, open_blob, refuse_storage_options
from labkit.data.tar.index import read_index
from labkit.data.tar.members import plain_name
from labkit.data.tar.readers import MODES

_HEADER_BYTES = tarfile.BLOCKSIZE


class TarStore:
    """Image files in an uncompressed tar.

    Args:
        path: A path, or a URL (`http://`, `s3://`, anything that fsspec opens) in mode `"index"`.
        mode: `"index"` keeps each member's offset and size in a file beside the tar, built by one pass over the
            headers, and reads by one `pread`. `"tarfile"` opens the tar once per process and asks `tarfile` for each
            member, as Marigold does: the first look-up reads every header, and every look-up searches all names.
            `"reopen"` opens the tar again for each image, and so reads all headers each time.
        **storage_options: Passed to fsspec, for object storage.

    Raises:
        FileNotFoundError: no such tar, or it holds no image (on the first call of `keys()`).
        TarError: the tar is compressed, cut or damaged, or not a tar; names the remedy. Raised on first use. Also for
            a sparse member of more than 1024 MB (`LABKIT_MAX_FILE_MB`), and for headers of more than a MiB.
        ValueError: unknown mode.
        TypeError: options for a place that takes none.

    Keys have no leading `./`; `read` takes them with or without. A link gives its target's bytes. The index is built
    again when the tar's size or modification time has changed; it may be deleted at any time.

    Taught in: notebooks/09_marigold_storage.ipynb
    """

    def __init__(self, path: str | os.PathLike, mode: str = "index", **storage_options: Any):
        require_choice("mode", mode, MODES)
        if is_url(path) and mode != "index":
            raise ValueError(f"mode={mode!r} needs a local file: mode='index' reads URLs")
        refuse_storage_options(path, storage_options)
        self.mode = mode
        self._blob = open_blob(path, **storage_options)
        if isinstance(self._blob, LocalBlob):
            self._blob.fingerprint()  # raise for a missing file here, not in a worker
        self._index = Lazy(partial(read_index, self._blob))
        self._reader = MODES[mode](self._blob, self._index)
        self._keys: PackedStrings | None = None

    def __repr__(self) -> str:
        return f"TarStore({self.name!r}, mode={self.mode!r}, {len(self.keys())} images)"

    @property
    def name(self) -> str:
        """The file's name, without its folder."""
        return os.path.basename(self._blob.name)

    def __len__(self) -> int:
        return len(self.keys())

    def keys(self) -> PackedStrings:
        """Names of all JPEG, PNG and WebP members, sorted; hidden ones are left out."""
        if self._keys is None:
            names = self.names()
            all_images = all(map(is_image, names))  # then the index and the keys share their memory
            keys = PackedStrings(names if all_images else filter(is_image, names))
            if not len(keys):
                raise FileNotFoundError(f"{self._blob.name} holds no image")
            self._keys = keys
        return self._keys

    def names(self) -> Sequence[str]:
        """Names of all members with data, images or not, sorted."""
        return self._reader.names()

    def read(self, key: str) -> bytes:
        """A member's bytes. Raises KeyError for an unknown one, TarError if the tar was cut meanwhile."""
        return self._reader.read(key)

    def evict(self) -> int:
        """Drop the tar from the page cache; returns its bytes. Raises OSError if that is impossible."""
        if not isinstance(self._blob, LocalBlob):
            raise OSError(f"{self._blob.name} is not a local file: this machine's page cache does not hold it")
        return evict([self._blob.name])

    def sizes(self) -> np.ndarray:
        """Bytes of each image, int64, in the order of `keys()`."""
        return self._index().sizes[self._rows()]

    def offsets(self) -> np.ndarray:
        """Where the data of each image begin, int64, in the order of `keys()`; sort by them to read sequentially."""
        return self._index().offsets[self._rows()]

    def extents(self, key: str, first: bool) -> Iterator[Extent]:
        """What a disk has to touch for `read(key)`, for `SimulatedStore`. `first`: whether it is the process' first."""
        index = self._index()
        row = index.row(plain_name(key))
        opens = first or self.mode == "reopen"
        if opens and self.mode != "index":
            headers = np.unique(index.offsets[index.offsets >= 0]) - _HEADER_BYTES  # -1: a link that leads nowhere
            yield from (
                Extent(self._blob.name, int(offset), _HEADER_BYTES, number == 0)
                for number, offset in enumerate(headers)
            )
            opens = False
        yield Extent(self._blob.name, int(index.offsets[row]), int(index.sizes[row]), opens)

    def _rows(self) -> np.ndarray:
        index = self._index()
        return np.fromiter((index.row(key) for key in self.keys()), np.int64, len(self))
