"""Which decoder is fastest on these very files."""

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd

from labkit.data import DECODERS, DecodeError, ImageDataset, decode, missing_decoders
from labkit.measure import compare, quiet_summary

_OTHER_WORK = {"pil_draft"}  # decodes to another size

_PREFERRED = "turbojpeg"  # unless the fastest is faster: the default elsewhere too

_N_FILES, _N_TRIAL_FILES, _ROUNDS = 24, 4, 5


def fastest_decoder(dataset: Any, *, limit_s: float, seed: int = 0) -> tuple[str | None, pd.DataFrame | None]:
    """The decoder that is certainly faster than the data set's own, on some of its files, in one thread.

    Returns:
        Its name, or None if there is none or the data set is not an `ImageDataset`; and the frame that shows it.
    """
    if not isinstance(dataset, ImageDataset) or type(dataset)._decode is not ImageDataset._decode:
        return None, None
    files, own = _read_some_files(dataset, seed), dataset.decoder
    unusable = {*missing_decoders(), *_OTHER_WORK} - {own}
    candidates = [name for name in dict.fromkeys([own, *DECODERS]) if name not in unusable]
    able = {name: seconds for name in candidates if (seconds := _seconds_per_file(files, name)) is not None}
    if own not in able or len(able) < 2:
        return None, None
    n_files = int(max(_N_TRIAL_FILES, limit_s / (_ROUNDS + 1) / sum(able.values())))
    variants = {name: _decode_files(files[:n_files], name) for name in able}
    frame = compare(variants, baseline=own, rounds=_ROUNDS, progress=False, rung=False)
    return _fastest_label(frame, own), frame


def _fastest_label(frame: pd.DataFrame, own: str) -> str | None:
    summary = quiet_summary(frame, own)
    faster = summary[summary["verdict"] == "faster"]
    if faster.empty:
        return None
    best = str(faster["speedup"].idxmax())
    to_best = quiet_summary(frame, best)["verdict"]
    return _PREFERRED if _PREFERRED in faster.index and to_best[_PREFERRED] == "inconclusive" else best


def _read_some_files(dataset: ImageDataset, seed: int) -> list[bytes]:
    rows = random.Random(seed).sample(range(len(dataset)), min(_N_FILES, len(dataset)))
    return [dataset.store.read(dataset.keys[row]) for row in rows]


def _seconds_per_file(files: list[bytes], decoder: str) -> float | None:
    """Measured on a few files; None if the decoder cannot read one of them."""
    trial = files[:_N_TRIAL_FILES]
    start = time.perf_counter()
    try:
        for data in trial:
            decode(data, decoder)
    except (DecodeError, ImportError):
        return None
    return (time.perf_counter() - start) / len(trial)


def _decode_files(files: list[bytes], decoder: str) -> Callable[[], Iterator[int]]:
    return lambda: (len(decode(data, decoder)[:1]) for data in files)
