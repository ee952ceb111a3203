"""What a batch is: its tensors and bytes, and what of them makes it dear to hand over, to pin and to copy.

One batch is looked at, in the training process: only the standard library and torch are imported.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from labkit.util.tensor_trees import iter_tensors

_SMALL_BYTES = 64_000  # a tensor's own costs weigh more than its bytes
_MANY = 16  # such tensors in a batch
_LEAST_PIXELS = 8  # of a side of an image
_N_VALUES = 4096  # of a channel that are looked at
_BYTE_VALUES = 256
_MAIN_SHARE = 0.99  # of the bytes: the rest is not worth a word


@dataclass(frozen=True)
class BatchFacts:
    """One batch of a loader.

    n_bytes: Of all its tensors; `dtypes` has those of each type, by name.
    n_bytes_as_uint8: The same if the float32 images whose values fit bytes were uint8.
    n_small: Tensors of fewer than 64 kB.
    n_strided: Tensors with gaps between their elements, which are made contiguous before they are copied to a device.
    n_on_host: Tensors in host memory.
    n_pinned: Of them in pinned memory; None where CUDA is not in use.
    pin_s: Seconds that torch took to pin a batch, on average; None if it pinned none.
    """

    n_tensors: int
    n_bytes: int
    dtypes: dict[str, int]
    n_bytes_as_uint8: int
    n_small: int
    n_strided: int
    n_on_host: int
    n_pinned: int | None
    pin_s: float | None = None

    def sentences(self, *, is_dear: bool, pin_share: float, has_workers: bool, pins: bool) -> Iterator[str]:
        """The batch in words, and what to change of it.

        Args:
            is_dear: Whether handing over, pinning or copying takes a share of the time that is worth a change.
            pin_share: What pinning took, as a share of the time of a batch.
            has_workers: Whether it comes from another process.
            pins: Whether the loader is to pin it.
        """
        yield f"A batch is {self._amount}{self._as_bytes(is_dear)}{self._pinning(pin_share, has_workers)}."
        if self.n_small >= _MANY and is_dear and (has_workers or pins):
            costs = " and ".join(["sent from its worker"] * has_workers + ["pinned"] * pins)
            yield (
                f"{self.n_small} of its tensors are smaller than {_size(_SMALL_BYTES)}, and each is {costs} on its "
                "own: stack them in collate_fn."
            )
        if self.n_strided and is_dear:
            few = "1 tensor of a batch has" if self.n_strided == 1 else f"{self.n_strided} tensors of a batch have"
            yield f"{few} gaps between elements: .contiguous() in collate_fn saves a copy."
        if pins and self.n_pinned is not None and self.n_pinned < self.n_on_host:
            yield (
                f"pin_memory=True pins {self.n_pinned} of the {self.n_on_host} tensors of a batch: torch looks for "
                "them in dicts, lists and tuples; a class of your own needs a method pin_memory()."
            )

    @property
    def _amount(self) -> str:
        tensors = "1 tensor" if self.n_tensors == 1 else f"{self.n_tensors} tensors"
        if not self.n_bytes:
            return tensors
        by_size = sorted(self.dtypes.items(), key=lambda item: -item[1])
        if by_size[0][1] >= _MAIN_SHARE * self.n_bytes:
            return f"{tensors}, {_size(self.n_bytes)} of {by_size[0][0]}"
        return f"{tensors}, {_size(self.n_bytes)}: {', '.join(f'{name} {_size(each)}' for name, each in by_size[:3])}"

    def _as_bytes(self, is_dear: bool) -> str:
        if self.n_bytes_as_uint8 == self.n_bytes:
            return ""
        said = f"; its images have the values of bytes, and as uint8 it would be {_size(self.n_bytes_as_uint8)}"
        return f"{said}: convert and normalize where the step runs" if is_dear else said

    def _pinning(self, share: float, has_workers: bool) -> str:
        if self.pin_s is None:
            return "; it is not pinned" if self.n_pinned == 0 and self.n_on_host else ""
        where = ", in a thread beside the step" if has_workers else ""
        return f"; pinning it takes {rounded(1e3 * self.pin_s)} ms{where}, {share:.0%} of the time of a batch"


def look_at(batch: Any) -> BatchFacts | None:
    """The facts of a batch, of any nest of tensors that `labkit.util.tensor_trees` knows; None if it cannot be read.

    >>> look_at({"image": torch.zeros(8, 3, 224, 224), "label": torch.zeros(8)}).n_tensors  # doctest: +SKIP
    2
    """
    with suppress(Exception):  # the script's own classes need not let themselves be looked at
        tensors = list(iter_tensors(batch))
        n_bytes, dtypes = [tensor.numel() * tensor.element_size() for tensor in tensors], Counter[str]()
        for tensor, each in zip(tensors, n_bytes, strict=True):
            dtypes[str(tensor.dtype).removeprefix("torch.")] += each
        on_host = [tensor for tensor in tensors if tensor.device.type == "cpu"]
        saved = sum(each - each // 4 for tensor, each in zip(tensors, n_bytes, strict=True) if _fits_bytes(tensor))
        return BatchFacts(
            n_tensors=len(tensors), n_bytes=sum(n_bytes), dtypes=dict(dtypes), n_bytes_as_uint8=sum(n_bytes) - saved,
            n_small=sum(each < _SMALL_BYTES for each in n_bytes), n_strided=sum(map(_has_gaps, tensors)),
            n_on_host=len(on_host), n_pinned=_n_pinned(on_host),
        )  # fmt: skip
    return None


def _n_pinned(tensors: list[Any]) -> int | None:
    import torch  # whoever has tensors has imported it

    if not torch.cuda.is_initialized():  # asking would initialize it
        return None
    return sum(tensor.is_pinned() for tensor in tensors)


def _has_gaps(tensor: Any) -> bool:
    """Whether its elements, in whatever order, do not fill the memory from the first to the last."""
    with suppress(RuntimeError, NotImplementedError, AttributeError):  # sparse, nested
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return bool(tensor.numel() > 0 and span > tensor.numel())
    return False


def _fits_bytes(tensor: Any) -> bool:
    """Whether it is an image, or several, in float32 and with so few values that they were bytes: a photo, a mask.

    A map of depths, or a photo that was mixed or resized as floats, has more.
    """
    if (
        str(tensor.dtype) != "torch.float32"
        or tensor.device.type != "cpu"
        or tensor.dim() not in (3, 4)
        or not len(tensor)
    ):
        return False
    image = tensor.detach() if tensor.dim() == 3 else tensor.detach()[0]
    if min(sorted(image.shape)[1:], default=0) < _LEAST_PIXELS:
        return False
    channel = image[0] if image.shape[0] in (1, 3) else image[..., 0] if image.shape[-1] in (1, 3) else None
    if channel is None or channel.numel() <= _BYTE_VALUES:
        return False
    values = channel.reshape(-1)[:: -(-channel.numel() // _N_VALUES)]
    return len(set(values.tolist())) <= _BYTE_VALUES < len(values)


def rounded(value: float) -> str:
    """Three digits, or more before the point: 0.00123, 12.3, 1,234."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def _size(n_bytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= size:
            return f"{n_bytes / size:.3g} {unit}"
    return f"{n_bytes:.0f} bytes"
