"""What a store is: named bytes. Decoding is in `labkit.data.decoders`."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from labkit.core import PackedStrings
from labkit.data.blobs import Extent


@runtime_checkable
class Store(Protocol):
    """Named bytes. Stores survive fork and pickling (spawn): each process opens its own files on first use."""

    def keys(self) -> Sequence[str]:
        """Names of all images, sorted, with `/` between their parts."""

    def read(self, key: str) -> bytes:
        """Encoded contents of one image. Raises KeyError for an unknown key."""


@runtime_checkable
class HasSizes(Protocol):
    """A store that knows the size of its images."""

    def sizes(self) -> np.ndarray:
        """Bytes of each image, int64, in the order of `keys()`."""


@runtime_checkable
class HasExtents(Protocol):
    """A store that knows what a disk does for a read."""

    def extents(self, key: str, first: bool) -> Iterator[Extent]:
        """What `read(key)` touches; `first`: the first read of the process."""


class ListedStore(ABC):
    """A store that lists its keys once, on the first call of `keys()`.

    Args:
        name: Where it reads from, for messages; holds no credentials.
    """

    _keys: PackedStrings | None = None
    _if_empty = "holds no image"

    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {len(self)} images)"

    def __len__(self) -> int:
        return len(self.keys())

    def keys(self) -> PackedStrings:
        """Relative paths of all JPEG, PNG and WebP files, sorted. Raises FileNotFoundError if there are none."""
        if self._keys is None:
            keys = PackedStrings(sorted(self._list_keys()))
            if not keys:
                raise FileNotFoundError(f"{self.name} {self._if_empty}")
            self._keys = keys
        return self._keys

    @abstractmethod
    def _list_keys(self) -> Iterable[str]:
        """Keys of all images, in any order."""
