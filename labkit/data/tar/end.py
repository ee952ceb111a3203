"""What follows the last member of a tar: a mark of zeros, more zeros up to the end of a record, and nothing else."""

import tarfile
from collections.abc import Callable

from labkit.data.tar.compressions import BLOCK_BYTES
from labkit.data.tar.errors import TarError

_MAX_RECORD_BYTES = 4 << 20  # the largest that bsdtar takes


def check_end(read: Callable[[int], bytes], name: str, last: str, end: int, offset: int) -> str:
    """Read on to the end of the source.

    Args:
        read: Reads so many bytes, from `offset` on; b"" at the end.
        name: The tar.
        last: Its last member, "" if there is none.
        end: The byte at which that member and its padding end.
        offset: The byte up to which the source was read; from `end` on, only zeros.

    Returns:
        Why members may be missing; "" if nothing says so.

    Raises:
        TarError: something else than zeros follows.
    """
    while block := read(BLOCK_BYTES):
        if data := block.lstrip(b"\0"):
            raise _goes_on_error(name, last, offset + len(block) - len(data))
        offset += len(block)
    after = f"after {last!r}" if last else "before the first member"
    if offset - end < tarfile.BLOCKSIZE:
        return f"{name} has no end mark: it may be cut {after}"
    if offset - end >= 2 * tarfile.BLOCKSIZE + _padding_bytes(offset):
        return (
            f"{name} ends with {offset - end} zeros, more than fill a record: members {after} may be missing, as in a "
            "download that left a hole. Compare its size and checksum with those of its source"
        )
    return ""


def _padding_bytes(n_bytes: int) -> int:
    """The most zeros with which a writer fills up a tar that ends at `n_bytes`.

    Writers fill up to the end of a record: of 10,240 bytes where nobody asks for another size, and else of some
    multiple of a block that divides `n_bytes`. Of multiples above 64 KiB, only powers of two and 10,240 bytes times
    such a power are taken for one, since nearly every size of a tar has some large divisor.
    """
    small = range(tarfile.BLOCKSIZE, 1 << 16, tarfile.BLOCKSIZE)
    large = (unit << power for unit in (tarfile.BLOCKSIZE, tarfile.RECORDSIZE) for power in range(14))
    fitting = (size for size in (*small, *large) if size <= _MAX_RECORD_BYTES and n_bytes % size == 0)
    return max([2 * tarfile.RECORDSIZE, *fitting])  # two: `tar --concatenate` adds a record to that of the last tar


def _goes_on_error(name: str, last: str, offset: int) -> TarError:
    found = f"the last whole member before it is {last!r}" if last else "no member is before it"
    return TarError(
        f"{name} goes on at byte {offset} after an end mark ({found}): the rest would not be read. If it is damaged, "
        "copy or download it again; if several tars were joined by `cat`, unpack it by `tar --ignore-zeros -xf`, or "
        "join them by `tar --concatenate`, one at a time"
    )
