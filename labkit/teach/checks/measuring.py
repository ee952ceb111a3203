"""The checks of the exercises in notebooks 00 to 02: measuring, taking apart, decoding."""

from typing import Any

import numpy as np
import pandas as pd
import torch

from labkit.core import encode_image
from labkit.data import DecodeError, decode
from labkit.measure import quiet_summary
from labkit.teach.exercises import WrongAnswer, exercise, expect, expect_pair, frame_exercise, number_exercise

number_exercise("00.1", "A number, in images per second.", 256 / 0.4)
number_exercise("00.2", "A whole number of images.", 2 * 2 * 32, tolerance=0)
frame_exercise("00.4", "A frame from lk.compare with at least five rounds that count.", rounds=5, widest=0.1)
number_exercise("01.1", "A number: the new rate over the old.", 1 / (0.6 / 2 + 0.4))
number_exercise("01.2", "A number: the new rate over the old.", 1 / 0.4)
frame_exercise("01.4", 'A frame from lk.compare with baseline="naive".', speedup=1.1)


@exercise("00.3")
def check_verdict_of_five(answer: Any) -> None:
    """One of "faster", "slower", "inconclusive"."""
    straddles = "the ratios lie on both sides of 1, so their interval contains 1"
    expect(answer == "inconclusive", f"{answer!r}: {straddles}")


@exercise("01.3")
def check_size_reader(answer: Any) -> None:
    """A function of the encoded bytes that returns (width, height)."""
    from PIL import Image

    for size in ((80, 60), (50, 90)):
        whole = encode_image(Image.effect_noise(size, 50), "JPEG")
        for data, kind in ((whole, "complete"), (whole[: len(whole) // 2], "truncated")):
            found = tuple(answer(data))
            expect(found == size, f"for a {kind} file of {size} pixels (width, height) it returned {found}")


@exercise("01.5")
def check_own_stages(answer: Any) -> None:
    """A pair: your stopwatch's frame, and the seconds of the whole loop in the same run."""
    stages, wall_s = expect_pair(answer, '(watch.frame("mine"), seconds_of_the_whole)')
    is_frame = isinstance(stages, pd.DataFrame) and {"variant", "stage", "seconds"} <= set(stages.columns)
    expect(is_frame, f'a {type(stages).__name__} is not a frame of stages; watch.frame("mine") gives one')
    expect("naive" not in set(stages["variant"]), "these are the stages of the notebook; time your own")
    n_stages = stages["stage"].nunique()
    expect(n_stages >= 2, f"it has {n_stages} stage; put at least two steps inside `with watch(...)`")
    sum_s = float(stages["seconds"].sum())
    missing = "a step is outside of all stages"
    doubled = "a stage holds another one, or the stopwatch also ran elsewhere"
    apart = f"the stages take {sum_s:.3g} s, the whole {float(wall_s):.3g} s: {missing if sum_s < wall_s else doubled}"
    expect(abs(sum_s / float(wall_s) - 1) <= 0.1, apart)


@exercise("02.1")
def check_rgb_conversion(answer: Any) -> None:
    """A function of a (1, 2, 3 or 4, H, W) tensor, uint8 or uint16, that returns uint8 (3, H, W)."""
    levels = np.array([[0, 50, 100], [150, 200, 255]])
    for channels in (1, 2, 3, 4):
        stored = np.stack([levels, levels[::-1], levels[:, ::-1], levels])[:channels]
        expected = torch.from_numpy(stored if channels > 2 else stored[[0, 0, 0]])[:3]
        for dtype in (torch.uint8, torch.uint16):
            values = stored if dtype == torch.uint8 else stored * 256 + 255 - stored  # high and low byte differ
            found, case = answer(torch.from_numpy(values).to(dtype)), f"{channels} channels of {dtype}"
            is_rgb = tuple(found.shape) == (3, 2, 3) and found.dtype == torch.uint8
            expect(is_rgb, f"{case} gave {tuple(found.shape)} of {found.dtype}")
            off = int((found.int() - expected).abs().max())
            expect(off <= 1, f"{case}: a value is off by {off} of 255")


@exercise("02.2")
def check_rotating_decoders(answer: Any) -> None:
    """A set of names from lk.DECODERS."""
    found, expected = {answer} if isinstance(answer, str) else set(answer), {"cv2", "torchcodec"}
    wrong = [f"{name} does not" for name in found - expected]
    missing = [f"{len(expected - found)} missing"] if expected - found else []
    expect(found == expected, "; ".join(wrong + missing))


@exercise("02.3")
def check_scaled_size(answer: Any) -> None:
    """(height, width) in pixels."""
    why = "libjpeg-turbo decodes at n/8 of 1500 x 2000, and the result needs at least 256 rows"
    expect(tuple(answer) == (375, 500), f"{tuple(answer)}: {why}")


@exercise("02.4")
def check_end_of_lead(answer: Any) -> None:
    """A frame from lk.compare with the variants "pil" and "turbojpeg"."""
    if not isinstance(answer, pd.DataFrame) or not {"pil", "turbojpeg"} <= set(answer["variant"]):
        raise WrongAnswer('the answer must be a frame with the variants "pil" and "turbojpeg"')
    row = quiet_summary(answer, "pil").loc["turbojpeg"]
    expect(row["n_runs"] >= 5, f"it has {row['n_runs']} measured rounds; at least 5 are needed")
    lead = f"{row['speedup']:.2f}x as fast"
    expect(row["speedup"] < 1.2, f"turbojpeg is still {lead} on these files; try another format")


@exercise("02.5")
def check_own_files(answer: Any) -> None:
    """A pair: a dict of your files' bytes by name, and the set of decoders that get all of them right."""
    from labkit.teach.conformance import conformance

    files, names = expect_pair(answer, "(files, {names})")
    is_dict = isinstance(files, dict) and len(files) > 0
    expect(is_dict, "the first part must be a dict: {key: mine.read(key) for key in mine.keys()[:20]}")
    for name, data in files.items():
        _expect_whole(name, data)
    rows = conformance(files, by_default=True).sort_values("outcome").drop_duplicates("decoder")  # "differs" first
    results = rows.set_index("decoder")[["outcome", "file", "shape"]]
    found, right = {names} if isinstance(names, str) else set(names), set(results.index[results["outcome"] == "same"])
    for name in sorted(found - right):
        expect(name in results.index, f"{name!r} is none of {', '.join(results.index)}")
        outcome, file, shape = results.loc[name]
        raise WrongAnswer(f"{name} {outcome} for {file!r}: it gives {shape}, not the pixels of upright RGB")
    expect(found == right, f"{len(right - found)} more of the decoders give the right pixels for all {len(files)}")


def _expect_whole(name: str, data: bytes) -> None:
    """Refuse a broken file before a decoder that it could crash sees it."""
    try:
        decode(data, "pil")
    except DecodeError as error:
        raise WrongAnswer(f"leave {name!r} out, lk.decode refuses it: {error}") from error
