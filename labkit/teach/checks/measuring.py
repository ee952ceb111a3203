"""The checks of the exercises in notebooks 00 to 02: measuring, taking apart, decoding."""

import io
from typing import Any

import numpy as np
import pandas as pd
import torch

from labkit.measure import paired_ratios
from labkit.teach.exercises import exercise, frame_exercise, number_exercise

number_exercise("00.1", "A number, in images per second.", 256 / 0.4)
number_exercise("00.2", "A whole number of images.", 2 * 2 * 32, tolerance=0)
frame_exercise("00.4", "A frame from lk.compare with at least five rounds that count.", rounds=5, widest=0.1)
number_exercise("01.1", "A number: the new rate over the old.", 1 / (0.6 / 2 + 0.4))
number_exercise("01.2", "A number: the new rate over the old.", 1 / 0.4)
frame_exercise("01.4", 'A frame from lk.compare with baseline="naive".', rounds=3, widest=0.5, speedup=1.1)


@exercise("00.3")
def check_verdict_of_five(answer: Any) -> str | None:
    """One of "faster", "slower", "inconclusive"."""
    if answer == "inconclusive":
        return None
    return f"{answer!r}: the ratios lie on both sides of 1, so their interval contains 1"


@exercise("01.3")
def check_size_reader(answer: Any) -> str | None:
    """A function of the encoded bytes that returns (width, height)."""
    from PIL import Image

    for size in ((80, 60), (50, 90)):
        buffer = io.BytesIO()
        Image.effect_noise(size, 50).save(buffer, "JPEG")
        whole = buffer.getvalue()
        for data, kind in ((whole, "complete"), (whole[: len(whole) // 2], "truncated")):
            found = tuple(answer(data))
            if found != size:
                return f"for a {kind} file of {size} pixels (width, height) it returned {found}"
    return None


@exercise("02.1")
def check_rgb_conversion(answer: Any) -> str | None:
    """A function of a (1, 2, 3 or 4, H, W) tensor, uint8 or uint16, that returns uint8 (3, H, W)."""
    levels = np.array([[0, 50, 100], [150, 200, 255]])
    for channels in (1, 2, 3, 4):
        stored = np.stack([levels, levels[::-1], levels[:, ::-1], levels])[:channels]
        expected = torch.from_numpy(stored if channels > 2 else stored[[0, 0, 0]])[:3]
        for dtype in (torch.uint8, torch.uint16):
            values = stored if dtype == torch.uint8 else stored * 256 + 255 - stored  # high and low byte differ
            found = answer(torch.from_numpy(values).to(dtype))
            if tuple(found.shape) != (3, 2, 3) or found.dtype != torch.uint8:
                return f"{channels} channels of {dtype} gave {tuple(found.shape)} of {found.dtype}"
            off = int((found.int() - expected).abs().max())
            if off > 1:
                return f"{channels} channels of {dtype}: a value is off by {off} of 255"
    return None


@exercise("02.2")
def check_rotating_decoders(answer: Any) -> str | None:
    """A set of names from lk.DECODERS."""
    found, expected = {answer} if isinstance(answer, str) else set(answer), {"cv2", "torchcodec"}
    errors = [f"{name} does not" for name in found - expected]
    if expected - found:
        errors.append(f"{len(expected - found)} missing")
    return "; ".join(errors) or None


@exercise("02.3")
def check_scaled_size(answer: Any) -> str | None:
    """(height, width) in pixels."""
    if tuple(answer) == (375, 500):
        return None
    return f"{tuple(answer)}: libjpeg-turbo decodes at n/8 of 1500 x 2000, and the result needs at least 256 rows"


@exercise("02.4")
def check_end_of_lead(answer: Any) -> str | None:
    """A frame from lk.compare with the variants "pil" and "turbojpeg"."""
    if not isinstance(answer, pd.DataFrame) or not {"pil", "turbojpeg"} <= set(answer["variant"]):
        return 'the answer must be a frame with the variants "pil" and "turbojpeg"'
    runs = answer[~answer["is_warmup"].astype(bool)]
    own, base = runs[runs["variant"] == "turbojpeg"], runs[runs["variant"] == "pil"]
    if len(own) < 5:
        return f"it has {len(own)} measured rounds; at least 5 are needed"
    lead = float(paired_ratios(own, base)["speedup"].median())
    return None if lead < 1.2 else f"turbojpeg is still {lead:.2f}x as fast on these files; try another format"
