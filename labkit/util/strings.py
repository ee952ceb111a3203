"""Many strings in two arrays, which forked workers share without copying."""

import io
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import overload

import numpy as np

from labkit.errors import ArgumentError, WrongTypeError

_BATCH = 1 << 12  # strings that exist as objects at a time


class PackedStrings(Sequence[str]):
    """An immutable sequence of strings, kept as one block of UTF-8 and the offsets in it.

    Reading an item of a Python list changes its reference count, so a forked worker copies the page that it shared with
    its parent; after an epoch each worker has its own copy of all names. Reading from this sequence writes nothing.
    A copy made by the constructor shares the arrays.

    >>> names = lk.PackedStrings(f"cat/{n}.jpg" for n in range(1000))
    >>> names[999], len(names)
    ('cat/999.jpg', 1000)

    Taught in: notebooks/03c_worker_memory.ipynb
    """

    def __init__(self, strings: Iterable[str]):
        if isinstance(strings, PackedStrings):
            self._block, self._offsets = strings.arrays()
            return
        block, lengths = io.BytesIO(), array("q", [0])
        try:
            for string in strings:
                lengths.append(block.write(string.encode("utf-8", "surrogateescape")))  # file names may be broken UTF-8
        except (TypeError, AttributeError) as error:
            raise WrongTypeError(f"strings must be an iterable of strings, got {strings!r:.100}") from error
        self._offsets = np.cumsum(lengths, dtype=np.int64)
        self._block = np.frombuffer(block.getvalue(), dtype=np.uint8)

    @classmethod
    def from_arrays(cls, block: np.ndarray, offsets: np.ndarray) -> "PackedStrings":
        """The inverse of `arrays()`. Raises ValueError if the two do not match."""
        kinds = [(array.ndim, array.dtype) for array in (block, offsets)]
        whole = kinds == [(1, np.dtype(np.uint8)), (1, np.dtype(np.int64))] and len(offsets) > 0
        if not whole or offsets[0] != 0 or offsets[-1] != len(block) or (np.diff(offsets) < 0).any():
            raise ArgumentError("these arrays are not packed strings")
        strings = cls(())
        strings._block, strings._offsets = block, offsets
        return strings

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """The block (uint8) and the offsets of the strings in it (int64, one more than there are strings)."""
        return self._block, self._offsets

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        if not hasattr(index, "__index__"):
            raise WrongTypeError(f"an index must be an integer from 0 to {len(self) - 1}, got {index!r:.100}")
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"index {index} is out of range: there are {len(self)} strings")
        start, end = self._offsets[position : position + 2]
        return self._block[start:end].tobytes().decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        for first in range(0, len(self), _BATCH):
            offsets = self._offsets[first : first + _BATCH + 1]
            block = self._block[offsets[0] : offsets[-1]].tobytes()
            for start, end in pairwise((offsets - offsets[0]).tolist()):
                yield block[start:end].decode("utf-8", "surrogateescape")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(own == theirs for own, theirs in zip(self, other, strict=True))

    def __repr__(self) -> str:
        return f"PackedStrings({len(self)} strings, {(self._block.nbytes + self._offsets.nbytes) / 1e6:.1f} MB)"
