"""Which decoder is fastest on these very files."""

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd

from labkit.data import DECODERS, DecodeError, ImageDataset, decode, missing_decoders
from labkit.measure import compare, quiet_summary

_SMALLER = {"pil_draft"}  # decodes at another size: other work

_PREFERRED = "turbojpeg"  # where it is not slower than the fastest: the default elsewhere too

_N_FILES, _ROUNDS = 24, 5


def fastest_decoder(dataset: Any, *, limit_s: float, seed: int = 0) -> tuple[str | None, pd.DataFrame | None]:
    """The decoder that is beyond doubt faster than the data set's own, on a few of its files, one thread.

    Returns:
        Its name, None where none is (or the data set is no `ImageDataset`), and the frame that shows it.
    """
    if not isinstance(dataset, ImageDataset) or type(dataset)._decode is not ImageDataset._decode:
        return None, None
    files = _some_files(dataset, seed)
    own, others = dataset.decoder, [name for name in DECODERS if name not in {*missing_decoders(), *_SMALLER}]
    able = {name: seconds for name in {own, *others} if (seconds := _seconds(files, name)) is not None}
    n_files = int(min(len(files), max(4, limit_s / (_ROUNDS + 1) / (sum(able.values()) or 1) * len(files))))
    if own not in able or len(able) < 2:
        return None, None
    variants = {name: _decoded(files[:n_files], name) for name in able}
    frame = compare(variants, baseline=own, rounds=_ROUNDS, progress=False, rung=False)
    return _fastest(frame, own), frame


def _fastest(frame: pd.DataFrame, own: str) -> str | None:
    summary = quiet_summary(frame, own)
    faster = summary[summary["verdict"] == "faster"]
    if faster.empty:
        return None
    best = str(faster["speedup"].idxmax())
    to_best = quiet_summary(frame, best)["verdict"]
    return _PREFERRED if _PREFERRED in faster.index and to_best[_PREFERRED] == "inconclusive" else best


def _some_files(dataset: ImageDataset, seed: int) -> list[bytes]:
    rows = random.Random(seed).sample(range(len(dataset)), min(_N_FILES, len(dataset)))
    return [dataset.store.read(dataset.keys[row]) for row in rows]


def _seconds(files: list[bytes], decoder: str) -> float | None:
    """Seconds for all files, as far as four show it; None where the decoder cannot read one."""
    shown = files[:4]
    try:
        start = time.perf_counter()
        for data in shown:
            decode(data, decoder)
    except (DecodeError, ImportError):
        return None
    return (time.perf_counter() - start) / len(shown) * len(files)


def _decoded(files: list[bytes], decoder: str) -> Callable[[], Iterator[int]]:
    return lambda: (len(decode(data, decoder)[:1]) for data in files)
