"""Details of a run: its images, the end of its work on the GPU, where its bytes came from."""

import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

_COLD_SHARE = 0.9  # of the evicted bytes that must come from storage for a run to count as cold


def count_images(batch: Any) -> int:
    """Images in a batch, by the rule in `compare`."""
    if isinstance(batch, int):
        return batch
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return 1 if len(shape) == 3 else int(shape[0])
    if isinstance(batch, Mapping):
        return count_images(next(iter(batch.values())))
    if is_dataclass(batch) and fields(batch):
        return count_images(getattr(batch, fields(batch)[0].name))
    if isinstance(batch, list | tuple) and len(batch):
        return count_images(batch[0])
    raise TypeError(f"cannot count the images of a {type(batch).__name__}: pass count= to compare")


def synchronize() -> None:
    """Wait for the GPU, if one is in use, so that queued work is part of the measured time."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def page_cache_state(before: int | None, after: int | None, *, asked: bool = False, evicted: int = 0) -> str:
    """The state of the page cache, from `read_bytes` before and after a run."""
    if before is None or after is None:
        return "unknown"
    read = after - before
    if asked:
        return "cold" if evicted and read >= _COLD_SHARE * evicted else "not cold"
    return "warm" if read == 0 else "unknown"
