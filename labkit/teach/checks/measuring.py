"""The checks of the exercises in notebooks 00 to 02: measuring, taking apart, decoding."""

import io
from typing import Any

import numpy as np
import pandas as pd
import torch

from labkit.measure import paired_ratios, summarize
from labkit.teach.exercises import exercise, judge, near


@exercise("00.1")
def rate_of_an_epoch(answer: Any) -> str | None:
    """A number, in images per second."""
    return near(answer, 256 / 0.4)


@exercise("00.2")
def images_ready_before_the_clock(answer: Any) -> str | None:
    """A whole number of images."""
    return near(answer, 2 * 2 * 32, tolerance=0)


@exercise("00.3")
def what_five_ratios_allow(answer: Any) -> str | None:
    """One of "faster", "slower", "inconclusive"."""
    if answer == "inconclusive":
        return None
    return f"{answer!r}: an interval around ratios on both sides of 1 contains 1"


@exercise("00.4")
def a_conclusive_experiment(answer: Any) -> str | None:
    """A frame from lk.compare with at least five rounds that count."""
    return judge(answer, rounds=5, widest=0.1)


@exercise("01.1")
def amdahl_for_a_faster_decoder(answer: Any) -> str | None:
    """A number: the new rate over the old."""
    return near(answer, 1 / (0.6 / 2 + 0.4))


@exercise("01.2")
def amdahl_for_a_free_decoder(answer: Any) -> str | None:
    """A number: the new rate over the old."""
    return near(answer, 1 / 0.4)


@exercise("01.3")
def size_without_decoding(answer: Any) -> str | None:
    """A function of the encoded bytes that returns (width, height)."""
    from PIL import Image

    for size in ((80, 60), (50, 90)):
        buffer = io.BytesIO()
        Image.effect_noise(size, 50).save(buffer, "JPEG")
        whole, headers_only = buffer.getvalue(), buffer.getvalue()[: buffer.tell() // 2]
        for data, what in ((whole, "whole"), (headers_only, "cut-off")):
            found = tuple(answer(data))
            if found != size:
                return f"a {what} file of {size} pixels (width, height) was measured as {found}"
    return None


@exercise("01.4")
def a_faster_loader(answer: Any) -> str | None:
    """A frame from lk.compare with baseline="naive"."""
    wrong = judge(answer, rounds=3, widest=0.5)
    if wrong:
        return wrong
    summary = summarize(answer)
    best = summary.loc[summary["verdict"] == "faster", "speedup"].max()
    return None if best >= 1.1 else f"the fastest variant reaches {best:.2f}x; 1.1x is wanted"


@exercise("02.1")
def any_tensor_to_rgb(answer: Any) -> str | None:
    """A function of a (1, 2, 3 or 4, H, W) tensor, uint8 or uint16, that returns uint8 (3, H, W)."""
    levels = np.array([[0, 50, 100], [150, 200, 255]])
    for channels in (1, 2, 3, 4):
        stored = np.stack([levels, levels[::-1], levels[:, ::-1], levels])[:channels]
        expected = torch.from_numpy(stored if channels > 2 else stored[[0, 0, 0]])[:3]
        for dtype in (torch.uint8, torch.uint16):
            values = stored if dtype == torch.uint8 else stored * 256 + 255 - stored  # high and low byte differ
            found = answer(torch.from_numpy(values).to(dtype))
            if tuple(found.shape) != (3, 2, 3) or found.dtype != torch.uint8:
                return f"{channels} channels of {dtype} became {tuple(found.shape)} of {found.dtype}"
            off = int((found.int() - expected).abs().max())
            if off > 1:
                return f"{channels} channels of {dtype}: a value is off by {off} of 255"
    return None


@exercise("02.2")
def decoders_that_turn_the_picture(answer: Any) -> str | None:
    """A set of names from lk.DECODERS."""
    found, expected = {answer} if isinstance(answer, str) else set(answer), {"cv2", "torchcodec"}
    if found == expected:
        return None
    wrong = [f"{name} does not" for name in found - expected] + [f"{len(expected - found)} missing"] * bool(
        expected - found
    )
    return "; ".join(wrong)


@exercise("02.3")
def dct_scaled_size(answer: Any) -> str | None:
    """(height, width) in pixels."""
    if tuple(answer) == (375, 500):
        return None
    return f"{tuple(answer)}: libjpeg-turbo decodes at n/8 of 1500 x 2000, and must keep 256 rows"


@exercise("02.4")
def where_the_lead_ends(answer: Any) -> str | None:
    """A frame from lk.compare with the variants "pil" and "turbojpeg"."""
    if not isinstance(answer, pd.DataFrame) or not {"pil", "turbojpeg"} <= set(answer["variant"]):
        return 'it takes a frame with the variants "pil" and "turbojpeg"'
    runs = answer[~answer["is_warmup"].astype(bool)]
    own, base = runs[runs["variant"] == "turbojpeg"], runs[runs["variant"] == "pil"]
    if len(own) < 5:
        return f"{len(own)} rounds count; five are wanted"
    lead = float(paired_ratios(own, base)["speedup"].median())
    return None if lead < 1.2 else f"turbojpeg still leads {lead:.2f}x on these files; try another format"
