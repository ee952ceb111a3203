"""The checks of the exercises, by notebook. An exercise's docstring is the hint for an empty answer."""

import hashlib
import random
import tarfile
from collections import Counter
from collections.abc import Iterator
from itertools import combinations_with_replacement, product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch.utils.data import Dataset, default_collate

from labkit.course.claim_trials import (
    FAILS,
    HOLDS,
    LARGER,
    MISSING,
    NEEDS_GPU,
    OPEN,
    Reading,
    agreeing_range,
    reaches,
    together,
)
from labkit.course.exercises import (
    WrongAnswer,
    exercise,
    expect,
    expect_frame,
    expect_pair,
    expect_runs,
    expect_settled,
    frame_exercise,
    number_exercise,
)
from labkit.data.buckets import upright_sizes
from labkit.data.decode import decode
from labkit.errors import DecodeError
from labkit.loading.seeding import count_repeats
from labkit.measure.statistics import quiet_summary, summarize
from labkit.peers.peer import JPEG_FILES, JPEG_PACKED, RAW_PIXELS
from labkit.planning.formulas import LoaderCosts
from labkit.planning.plan import Plan
from labkit.util.pictures import encode_image

number_exercise("12.1", "A number: the rate with free data over the rate now.", 200 / 80)
number_exercise("12.2", "A whole number of workers.", 240 / 40, tolerance=0)
number_exercise("12.3", "A number, in seconds.", 16 * 2 / 40)
number_exercise("13.1", "A number of cores.", 0.8 / 1000 * 8000)
number_exercise("13.2", "A number: rate after, over rate now.", 3100 / 2600)
number_exercise("14.1", "A number: how many times as fast.", 4.6 / 3.9)
number_exercise("15.1", "A number of requests.", 8 * 2500 * 0.150)

_WORTH_IT = 1.2  # the speed-up that is asked for


@exercise("12.4")
def check_lost_share(answer: Any) -> None:
    """A function of (step_s, loader_s, together_s) that returns a number from 0 to 1."""
    for step_s, loader_s, together_s in ((0.08, 0.2, 0.2), (0.08, 0.01, 0.08), (0.05, 0.05, 0.1), (0.1, 0.02, 0.098)):
        lost, found = max(0.0, 1 - step_s / together_s), float(answer(step_s, loader_s, together_s))
        case = f"step {step_s} s, loader {loader_s} s, both {together_s} s"
        expect(abs(found - lost) <= 1e-6, f"{case}: {lost:.3f} is lost; it returned {found:.3f}")


@exercise("12.5")
def check_cured_stall(answer: Any) -> None:
    """A frame from lk.compare with two loaders before one step, and the variant "step alone"."""
    expect_runs(answer)
    variants = set(answer["variant"])
    expect("step alone" in variants, 'it has no variant "step alone": without it, nobody can see what is possible')
    loaders, ceiling = answer[answer["variant"] != "step alone"], summarize(answer).loc["step alone"]
    expect(ceiling["verdict"] != "baseline", "its baseline is the step alone; make a loader the baseline")
    best, most = summarize(loaders)["speedup"].max(), ceiling["ci_high"]
    too_fast = f"a loader reaches {best:.2f}x, more than the {most:.2f}x of the step alone: not the same step"
    expect(best <= most, too_fast)
    if most < _WORTH_IT:  # no loader can bring more
        return
    expect(len(variants) > 2, f"it has only one loader; two are needed, since the step alone may reach {most:.2f}x")
    half_of_it = 1 + max(0, ceiling["speedup"] - 1) / 2
    expect_frame(loaders, widest=1, speedup=round(min(_WORTH_IT, half_of_it), 2))


@exercise("13.3")
def check_comparable(answer: Any) -> None:
    """A function of two pairs (source, antialias) that returns True or False."""
    loaders = list(product((JPEG_FILES, JPEG_PACKED, RAW_PIXELS), (True, False, None)))
    for one, other in product(loaders, repeat=2):
        same_source = (one[0] == RAW_PIXELS) == (other[0] == RAW_PIXELS)
        expected = same_source and (one[1] == other[1] or None in (one[1], other[1]))
        found, may = answer(one, other), "may" if expected else "may not"
        expect(bool(found) == expected, f"{one} and {other} {may} be compared; it returned {found!r}")


@exercise("13.4")
def check_own_peer(answer: Any) -> None:
    """A frame of your loader, from course.compare_peers(peers=[...]) or from lk.compare with source= and antialias=."""
    expect_settled(answer, speedup=1.1)
    has_class = {"source", "antialias"} <= set(answer.columns)
    remedy = "make it with course.compare_peers, or pass lk.compare source= and antialias="
    expect(has_class, f"it does not say what its variants read and how they resample: {remedy}")
    left_out = [f"{row['name']} {row['state']}: {row['why']}" for row in answer.attrs.get("left_out", [])]
    has_peer = "kind" not in answer or (answer["kind"] == "peer").any()
    expect(has_peer, f"no peer has run: {'; '.join(left_out) or 'none was given'}")


@exercise("14.2")
def check_ratio_verdict(answer: Any) -> None:
    """A function of (low, high, claimed, up_to) that returns the outcome for a claimed range of ratios."""
    intervals = ((2.2, 2.4), (1.4, 2.6), (1.2, 1.4), (1.01, 1.04), (0.8, 1.03), (0.9, 2.5), (0.5, 0.8), (3.5, 300.0))
    for (claimed, up_to), (low, high) in product(((1.3, 2.0), (1.1, 1.1), (2.0, 2.0)), intervals):
        expected = reaches(Reading(low=low, high=high), agreeing_range(claimed, up_to))
        found = answer(low, high, claimed, up_to)
        case = f"[{low}, {high}] against {claimed}x to {up_to}x"
        expect(found == expected, f"{case} should give {expected!r}; it gave {found!r}")


@exercise("14.3")
def check_claim_verdict(answer: Any) -> None:
    """A function of a list of outcomes that returns the verdict on the claim."""
    for size in (1, 2, 3):
        for outcomes in combinations_with_replacement((HOLDS, LARGER, FAILS, OPEN, NEEDS_GPU, MISSING), size):
            expected, found = together(outcomes), answer(list(outcomes))
            expect(found == expected, f"the outcomes {list(outcomes)} should give {expected!r}; it gave {found!r}")


@exercise("14.4")
def check_own_claim(answer: Any) -> None:
    """Three things: a frame from lk.compare with two variants, the claimed ratio, and your verdict."""
    is_triple = isinstance(answer, tuple | list) and len(answer) == 3
    expect(is_triple, "pass three things: (frame, claimed ratio, verdict)")
    frame, claimed, verdict = answer
    others = expect_runs(frame, rounds=5)
    expect(len(others) == 1, f"it compares {len(others)} variants with the baseline; one is needed")
    expect(claimed > 1, f"the claimed ratio is {claimed}; one above 1 is needed: make the other variant the baseline")
    low, high = others.iloc[0][["ci_low", "ci_high"]]
    expected, case = reaches(Reading(low=low, high=high), agreeing_range(claimed)), f"[{low:.2f}, {high:.2f}]"
    expect(expected != OPEN, f"{case} does not settle a claim of {claimed}x: measure longer")
    expect(verdict == expected, f"{case} against {claimed}x gives {expected!r}, not {verdict!r}")


@exercise("15.2")
def check_own_costs(answer: Any) -> None:
    """What lk.loader_costs measured of your photos."""
    expect(isinstance(answer, LoaderCosts), f"it is a {type(answer).__name__}; lk.loader_costs gives LoaderCosts")
    expect("photos" in answer.by_data, "it holds nothing about your photos")
    cost = answer.by_data["photos"]["cpu_ms_per_image"]
    expect(cost.kind == "measured here", f"its core time was {cost.kind}, not measured")
    width = (cost.interval[1] - cost.interval[0]) / cost.value
    wide = f"the interval of its core time is {width:.0%} wide: measure again, quietly or with more rounds"
    expect(width <= 0.3, wide)


@exercise("15.3")
def check_own_plan(answer: Any) -> None:
    """An course.Plan of your own cluster."""
    expect(isinstance(answer, Plan), f"it is a {type(answer).__name__}; lk.plan gives a Plan")
    kinds = {name: each.kind for name, each in answer.setup.inputs.items()}
    for name, remedy in (
        ("images_per_s_per_gpu", "pass lk.plan your own images/s, or an lk.diagnose of your loader and step"),
        ("cpu_ms_per_image", "pass costs=lk.loader_costs(FOLDER) of your photos"),
        ("cores_per_node", "pass the cores_per_node of your machines"),
    ):
        is_own = kinds[name] in ("measured here", "entered")
        expect(is_own, f"its {name} is {kinds[name]}: {remedy}")


@exercise("15.4")
def check_own_storage(answer: Any) -> None:
    """A frame from lk.compare of two numbers of requests in flight to your storage."""
    expect_settled(answer, speedup=_WORTH_IT)


number_exercise("03.1", "A whole number of workers.", 10, tolerance=0)
number_exercise("03.2", "A number, in GB.", 8 * 0.5)
frame_exercise("03.4", "A frame from lk.compare whose baseline is a loader without workers.", speedup=1.2)
number_exercise("04.1", "A number, in MB (1e6 bytes).", 64 * 3 * 224 * 224 * 3 / 1e6)
frame_exercise("04.4", "A frame from lk.compare of two orders of the same transforms.", rounds=5, widest=0.2)
number_exercise("05.1", "A whole number of images.", 250, tolerance=0)
number_exercise("06.2", "A number from 0 to 1.", 0.75)
frame_exercise("06.4", "A frame from lk.compare with two variants of augmenting a batch.", rounds=5, widest=0.3)
number_exercise("07.1", "A number, in ms.", 75)
number_exercise("07.2", "A number, in ms.", 40)
number_exercise("07.3", "A number: the old step time over the new.", 40 / 30)


@exercise("03.3")
def check_draw(answer: Any) -> None:
    """A function of (seed, epoch, index) that returns a number from 0 to 1."""
    triples = list(product(range(3), range(3), range(30)))
    states = _global_states()
    draws = [float(answer(*triple)) for triple in triples]
    again = [float(answer(*triple)) for triple in reversed(triples)]
    expect(again == draws[::-1], "called again in another order, it returned other numbers")
    expect(_global_states() == states, "it changes the state of a global generator, and so what the model draws")
    n_distinct = len(set(draws))
    repeats = f"{len(triples)} different (seed, epoch, index) gave only {n_distinct} different numbers"
    expect(n_distinct == len(draws), repeats)
    is_spread = 0 <= min(draws) <= max(draws) <= 1 and abs(np.mean(draws) - 0.5) < 0.1
    expect(is_spread, f"the numbers must spread over 0 to 1; these lie between {min(draws):.2f} and {max(draws):.2f}")


def _global_states() -> tuple:
    numpy_state: Any = np.random.get_state()
    return random.getstate(), numpy_state[1].tolist(), torch.get_rng_state().tolist()


@exercise("04.2")
def check_flips(answer: Any) -> None:
    """A function of a uint8 batch (N, 3, H, W) that returns the batch with each image flipped or not."""
    batch = torch.arange(64 * 3 * 2 * 4, dtype=torch.int32).remainder(251).to(torch.uint8).view(64, 3, 2, 4)
    given = batch.clone()
    found = answer(given)
    expect(torch.equal(given, batch), "it changes its input batch")
    _expect_like(found, batch)
    same, flipped = ((found == image).flatten(1).all(1) for image in (batch, batch.flip(3)))
    n_other, share = int((~(same | flipped)).sum()), float(flipped.float().mean())
    expect(not n_other, f"{n_other} of 64 images are neither the original nor its mirror image")
    expect(0.2 < share < 0.8, f"{share:.0%} of the images of a batch are flipped; it should be about half")


def _expect_like(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Refuse a tensor of another shape or type."""
    shape, expected_shape = tuple(found.shape), tuple(expected.shape)
    is_like = shape == expected_shape and found.dtype == expected.dtype
    expect(is_like, f"it returned {shape} of {found.dtype} instead of {expected_shape} of {expected.dtype}")


@exercise("04.3")
def check_normalized(answer: Any) -> None:
    """A function of a uint8 batch (N, 3, H, W) that returns it as float32, scaled and normalized."""
    batch = torch.arange(2 * 3 * 4 * 5, dtype=torch.int32).mul(2).to(torch.uint8).view(2, 3, 4, 5)
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    expected = (batch.numpy() / 255 - mean[:, None, None]) / std[:, None, None]
    found = answer(batch)
    _expect_like(found, batch.float())
    off = float(np.abs(found.numpy() - expected).max())
    expect(off < 1e-5, f"a value is off by {off:.3g}")


@exercise("04.5")
def check_own_draws(answer: Any) -> None:
    """A pair: your augmentation, a function of a uint8 batch (N, 3, H, W), and one of your photos (3, H, W)."""
    augment, photo = expect_pair(answer, "(my_augment, my_photo)")
    calls = [augment(photo.expand(16, -1, -1, -1).clone()) for _ in range(16)]
    for found in calls:
        is_batch = isinstance(found, torch.Tensor) and len(found) == 16
        expect(is_batch, f"for a batch of 16 it returned a {type(found).__name__} that is no batch of 16")
    is_random = not all(torch.equal(found, calls[0]) for found in calls)
    n_alike = sum(bool((found == found[:1]).all()) for found in calls)
    expect(is_random or n_alike < 16, "16 calls on 16 copies of the photo gave one result: nothing in it is random")
    expect(n_alike < 16, "it draws once per call: in each of 16 calls, all 16 copies of the photo came out alike")


@exercise("05.2")
def check_tensor_view(answer: Any) -> None:
    """A function of a uint8 array (H, W, 3) that returns a tensor (3, H, W)."""
    pixels = np.arange(2 * 5 * 3, dtype=np.uint8).reshape(2, 5, 3)
    found = answer(pixels)
    expect(tuple(found.shape) == (3, 2, 5), f"(2, 5, 3) gave {tuple(found.shape)}")
    expect(np.array_equal(found.numpy().transpose(1, 2, 0), pixels), "the pixels are not the same")
    expect(found.data_ptr() == pixels.ctypes.data, "it copies: the tensor has memory of its own")


@exercise("05.3")
def check_leading_library(answer: Any) -> None:
    """A frame with the variants "v2" and "albumentations"."""
    expect_frame(answer, rounds=5, widest=0.3)
    has_both = {"v2", "albumentations"} <= set(answer["variant"])
    expect(has_both, 'the answer must be a frame with the variants "v2" and "albumentations"')
    lead = float(summarize(answer, baseline="v2").loc["albumentations", "speedup"])
    factor = max(lead, 1 / lead)
    expect(factor >= 1.5, f"the two differ by {factor:.2f}x; at least 1.5x is needed, whichever wins")


class _SameSample(Dataset):
    """A data set's first sample, as often as half of the draws that are counted."""

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return self.dataset[0]


@exercise("05.4")
def check_own_loader_draws(answer: Any) -> None:
    """(data set, make): a Dataset with random transforms, and a function of a Dataset that returns its DataLoader."""
    dataset, make = answer
    same, n_draws = _SameSample(dataset), 2 * len(_SameSample(dataset))
    loader = make(same)
    expect(loader.num_workers, "the loader has no workers: set num_workers, since only workers share their draws")
    expect(len(loader), f"the loader gives no batch of {len(same)} samples: choose a smaller batch_size")
    by_chance = count_repeats(default_collate([same[0]]) for _ in range(n_draws))
    few = f"in one process, {by_chance} of {n_draws} results repeat an earlier one: add a transform with more outcomes"
    expect(by_chance <= n_draws // 4, few)
    found = count_repeats(batch for _ in range(2) for batch in loader)
    repeated = f"{found} of {n_draws} results repeat an earlier one, but in one process {by_chance}"
    expect(found <= by_chance + n_draws // 8, f"{repeated}: workers or epochs share a generator")


@exercise("06.1")
def check_own_share(answer: Any) -> None:
    """A function of (top, bottom, left, right, height, width) that returns the image's own share."""
    for box in ((0, 10, 0, 20, 20, 40), (5, 20, 30, 40, 20, 40), (7, 7, 0, 40, 20, 40)):
        top, bottom, left, right, height, width = box
        share, found = 1 - (bottom - top) * (right - left) / (height * width), float(answer(*box))
        expect(abs(found / share - 1) <= 0.02, f"for {box} it returned {found:g} instead of {share:g}")


@exercise("06.3")
def check_brightness(answer: Any) -> None:
    """A function of a float batch (N, 3, H, W), values 0 to 1, that returns it brightened, image by image."""
    from labkit.course.readbacks import count_readbacks

    batch = torch.full((64, 3, 4, 5), 0.5)
    found, readbacks = count_readbacks(answer, batch)
    expect(not readbacks, f"it reads {readbacks} values back to the host: on a GPU, each read waits")
    _expect_like(found, batch)
    factors = found.flatten(1) / 0.5
    expect(float((factors - factors[:, :1]).abs().max()) <= 1e-5, "the factor varies within an image")
    low, high, different = float(factors.min()), float(factors.max()), len(factors[:, 0].unique())
    expect(different >= 32, f"64 images got {different} different factors")
    in_range = low > 0.59 and high < 1.41
    expect(in_range, f"the factors go from {low:.2f} to {high:.2f} instead of 0.6 to 1.4")


@exercise("06.5")
def check_own_augmentation(answer: Any) -> None:
    """(augment, batch): your function of a batch of images, and a batch (N, C, H, W) of your photos."""
    augment, batch = answer
    is_batch = isinstance(batch, torch.Tensor) and batch.ndim == 4 and len(batch)
    expect(is_batch, "the second part must be a tensor (N, C, H, W), such as next(iter(loader))[0]")
    same = batch[:1].repeat(16, 1, 1, 1)
    given = same.clone()
    found = augment(given)
    got: Any = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
    expect(got[:1] == (len(same),), f"it must return a tensor of {len(same)} images, as many as it got; it gave {got}")
    expect(torch.equal(given, same), "it changes its input batch")
    n_different = len(found.flatten(1).unique(dim=0))
    expect(n_different > 1, f"{len(same)} copies of your first image came out alike: it draws once for the batch")


@exercise("07.4")
def check_missing_method(answer: Any) -> None:
    """The name of a tensor's method, as a string."""
    names_it = "record_stream" in str(answer)
    expect(names_it, f"{answer!r} does not tell the allocator which stream still reads the memory")


@exercise("07.5")
def check_own_overlap(answer: Any) -> None:
    """A frame from lk.compare of your own loop as it is, with more overlap, and "compute alone"."""
    needed = 1.05
    if expect_runs(answer)["ci_high"].get("compute alone", np.inf) > needed:  # else there is nothing to gain
        expect_frame(answer[answer["variant"] != "compute alone"], speedup=needed)


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
    message = (
        f"the stages take {sum_s:.3g} s, the whole {float(wall_s):.3g} s: {missing if sum_s < wall_s else doubled}"
    )
    expect(abs(sum_s / float(wall_s) - 1) <= 0.1, message)


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
    from labkit.course.oracles import conformance

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


number_exercise("08.1", "A number, in hours.", 1_280_000 * 0.030 / 16 / 3600)
frame_exercise("08.3", "A frame from lk.compare of at least two ways to store or read the same images.", speedup=1.2)
number_exercise("08b.1", "A whole number of samples.", 1000, tolerance=0)
number_exercise("08b.3", "A number, in seconds.", 20_000 * 110e3 / 100e6)
frame_exercise("08b.4", "A frame from lk.compare of at least two buffers over your own shards.")
number_exercise("09.1", "A number, in minutes.", 107_770 * 8e-3 / 60)  # files, seconds a seek
number_exercise("09.2", "A whole number of scans.", 2 * 10, tolerance=0)
number_exercise("09.3", "A number: the old time over the new.", 4.0 / (4.0 - 0.1), tolerance=0.002)
frame_exercise("09.5", "A frame from lk.compare.", speedup=1.2)
number_exercise("10.1", "A number, in files per second.", 254 * 906 / 136)
number_exercise("10.4", "A number, in percent.", 100 * (1 - (1500 / 1000) / (640 / 384)))
number_exercise("10b.1", "A number, in seconds.", 20_000 * 2 * 8e-3)
frame_exercise("10b.3", "A frame from lk.compare with at least five rounds that count.", rounds=5, widest=0.2)
number_exercise("11.1", "A whole number of epochs.", 4, tolerance=0)
number_exercise("11.2", "A number: pixels a side after, over pixels a side before.", 224 / (0.08 * 256 * 341) ** 0.5)
frame_exercise("11.3", "A frame from lk.compare of at least two preparations of the same photos.", speedup=1.2)
number_exercise("11b.1", "A number, in GB.", 1_281_167 * 256 * 341 * 3 / 1e9)
number_exercise("11b.3", "A number of crops per second.", 1e6 / 12)


@exercise("08.2")
def check_sample_key(answer: Any) -> None:
    """A function of a member's name that returns its sample's key."""
    names = {
        "dog/a.jpg": "dog/a", "dog/a.cls": "dog/a", "v1.0/dog/a.seg.png": "v1.0/dog/a", "a.b.c": "a",
        "v1.0/a.jpg": "v1.0/a",
    }  # fmt: skip
    for name, key in names.items():
        found = answer(name)
        expect(found == key, f"{name!r} belongs to the sample {key!r}; it returned {found!r}")


@exercise("08.4")
def check_own_shards(answer: Any) -> None:
    """A pair: your store, such as lk.FolderStore("path/to/photos"), and the folder of its shards."""
    store, folder = answer
    shards = sorted(Path(folder).rglob("*.tar"))
    expect(shards, f"no file in {folder} ends in .tar")
    packed = Counter(_digest(data) for shard in shards for data in _members(shard))
    keys = store.keys()
    photos = {key: _digest(store.read(key)) for key in keys}
    stored = Counter(photos.values())  # files of a folder may be equal
    missing = [key for key, digest in photos.items() if packed[digest] < stored[digest]]
    examples = f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}"
    expect(not missing, f"{len(missing)} of {len(photos)} photos are not in the shards, byte for byte: {examples}")
    again = [key for key, digest in photos.items() if packed[digest] > stored[digest]]
    expect(not again, f"{len(again)} of {len(photos)} photos are in the shards more than once: {', '.join(again[:3])}")


def _members(shard: Path) -> Iterator[bytes]:
    with tarfile.open(shard) as tar:
        for member in tar:
            file = tar.extractfile(member)  # None for a folder
            if file is not None:
                yield file.read()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


@exercise("08b.2")
def check_shard_split(answer: Any) -> None:
    """A function of (shards, rank, world_size, worker, num_workers) that returns a list of shards."""
    for n_shards, world_size, num_workers in product((1, 3, 7, 16), (1, 2, 3), (1, 2, 4)):
        shards = [f"shard-{number:06d}.tar" for number in range(n_shards)]
        readers = product(range(world_size), range(num_workers))
        parts = [list(answer(list(shards), rank, world_size, worker, num_workers)) for rank, worker in readers]
        where = f"of {n_shards} shards on {world_size} ranks x {num_workers} workers"
        read = sorted(shard for part in parts for shard in part)
        n_unread, most = len(set(shards) - set(read)), max(read.count(shard) for shard in shards)
        expect(read == shards, f"{where}, {n_unread} are never read, and one is read {most} times")
        sizes = [len(part) for part in parts]
        uneven = f"{where}, one reader gets {max(sizes)} and another {min(sizes)}"
        expect(max(sizes) - min(sizes) <= 1, uneven)


@exercise("09.4")
def check_mirrored_columns(answer: Any) -> None:
    """A function of (width, new_width) that returns a list of column numbers."""
    for width, new_width in ((1024, 640), (8, 8), (9, 4), (6, 12)):
        expected = [width - 1 - (2 * column + 1) * width // (2 * new_width) for column in range(new_width)]
        found = [int(column) for column in answer(width, new_width)]
        expect(len(found) == new_width, f"for {width} -> {new_width} it returned {len(found)} columns")
        for column in range(new_width):
            wrong = f"column {column} is {found[column]} instead of {expected[column]}"
            expect(found[column] == expected[column], f"for {width} -> {new_width}, {wrong}")


_MODELS = ("sd", "sdxl", "sd3", "flux", "hi", "lumina", "anima")

# Kind of name that a wrong answer misreads -> such names, and what they state.
_NAMES: dict[str, list[tuple[str, tuple[str, int, int] | None]]] = {
    **{f"the caches of {model}": [(f"cat_0512x0768_{model}.npz", ("cat", 512, 768))] for model in _MODELS},
    "stems with _ in them": [("my_cat_2_0512x0768_sd.npz", ("my_cat_2", 512, 768))],
    "stems that look like a size": [("cat_0001x0002_0512x0768_sd.npz", ("cat_0001x0002", 512, 768))],
    "sizes above 9999": [("cat_12000x0768_sd.npz", ("cat", 12_000, 768))],
    "caches of text encoders": [
        ("cat_te_outputs.npz", None), ("cat_flux_te.npz", None), ("cat_0512x0768_sd3_te.npz", None),
    ],
    "caches without a size": [("cat.npz", None), ("cat_sd.npz", None)],
    "files that are not caches": [
        ("cat_0512x0768.jpg", None), ("cat_0512x0768_sd.npz.part", None), ("cat_0512x_sd.npz", None),
    ],
    "unknown models": [("cat_0512x0768_vae.npz", None)],
}  # fmt: skip


@exercise("10.2")
def check_name_reader(answer: Any) -> None:
    """A function of a name that returns (stem, width, height) or None."""
    for what, names in _NAMES.items():
        for name, expected in names:
            found = answer(name)
            is_right = found is None if expected is None else found is not None and tuple(found) == expected
            expect(is_right, f"{what}: {name!r} should give {expected!r}; it gave {found!r}")


def _cache(stem: str, width: int = 5, height: int = 6, model: str = "sd") -> str:
    return f"{stem}_{width:04}x{height:04}_{model}.npz"


# Case -> images, caches, and the sizes that they settle.
_CHAIN = {
    "plain names": (["a.png", "b.jpg"], [_cache("a"), _cache("b", 7, 8, "sdxl")], {"a.png": (5, 6), "b.jpg": (7, 8)}),
    "sd-scripts issue 1770, `-` before `_`": (
        ["beach_towel.png", "beach_towel-crop.png"],
        [_cache("beach_towel"), _cache("beach_towel-crop", 7, 8)],
        {"beach_towel.png": (5, 6), "beach_towel-crop.png": (7, 8)},
    ),
    "no cache, beside a longer name": (["a.png", "ab.png"], [_cache("ab")], {"ab.png": (5, 6)}),
    "no cache, beside a longer name with `_`": (["a.png", "a_b.png"], [_cache("a_b")], {"a_b.png": (5, 6)}),
    "brackets and stars": (["[x]*.png"], [_cache("[x]*")], {"[x]*.png": (5, 6)}),
    "dots in the stem": (["a.b.png", "a.png"], [_cache("a.b")], {"a.b.png": (5, 6)}),
    "a text encoder's cache": (["a.png"], ["a_sd3_te.npz", "a_te_outputs.npz", "a.npz"], {}),
    "caches that agree": (["a.png"], [_cache("a"), _cache("a", model="sdxl")], {"a.png": (5, 6)}),
    "caches that disagree": (["a.png"], [_cache("a"), _cache("a", 7, 8, "sdxl")], {}),
    "two images of one stem": (["a.png", "a.jpg"], [_cache("a")], {}),
    "a cache without an image": (["b.png"], [_cache("a")], {}),
}


@exercise("10.3")
def check_size_lookup(answer: Any) -> None:
    """A function of (images, caches) that returns {image: (width, height)}."""
    for done, (what, (images, caches, expected)) in enumerate(_CHAIN.items()):
        for seed in range(3):  # the answer must not rely on an order
            shuffled = [random.Random(seed).sample(names, len(names)) for names in (images, caches)]
            found = {image: tuple(size) for image, size in answer(*shuffled).items()}
            where = f"folder {done + 1} of {len(_CHAIN)}, {what}"
            expect(found == expected, f"{where}: it returned {found} instead of {expected}")


@exercise("10.5")
def check_own_buckets(answer: Any) -> None:
    """(sizes, sampler): lk.collect_sizes of your photos, and an lk.BucketBatchSampler of them."""
    sizes, sampler = answer
    upright = np.stack(upright_sizes(sizes), 1)
    shapes = np.array(sampler.buckets.shapes)[sampler.buckets.select(*upright.T)]
    cropped = 1 - float((shapes.prod(1) / sampler.buckets.resized(*upright.T).prod(1)).mean())
    one_square = 1 - float((upright.min(1) / upright.max(1)).mean())
    most = max(0.05, one_square / 2)
    advice = f"at most {most:.1%} is right: choose a smaller step or other shapes"
    expect(cropped <= most, f"{cropped:.1%} of the pixels are cropped away, by one square {one_square:.1%}; {advice}")
    batches = list(sampler)
    given = {index for batch in batches for index in batch}
    expect(given <= set(sizes.index), "the sampler is of other images: make it from the same frame")
    held = len(given) / len(sizes)
    expect(held >= 0.8, f"an epoch holds only {held:.0%} of the photos: use a smaller batch_size or another remainder")
    full = len(given) / (len(batches) * sampler.batch_size)
    expect(full >= 0.8, f"the photos fill only {full:.0%} of the batches: use a smaller batch_size or fewer shapes")


_PNG_START = b"\x89PNG\r\n\x1a\n" + b"\x00\x00\x00\rIHDR"


@exercise("10b.2")
def check_png_size(answer: Any) -> None:
    """A function of bytes that returns (width, height) or None."""
    for width, height in ((640, 480), (480, 640), (70_000, 1)):
        data = _PNG_START + width.to_bytes(4) + height.to_bytes(4) + bytes(9)
        found = answer(data)
        expect(found is not None and tuple(found) == (width, height), f"a PNG of {width} x {height}: it gave {found!r}")
    jpeg = b"\xff\xd8\xff\xe0" + bytes(40)
    others = {"a JPEG": jpeg, "no bytes": b"", "a PNG that ends within its height": data[:22],
              "a PNG whose first byte is damaged": b"\x00" + data[1:]}  # fmt: skip
    for what, begin in others.items():
        found = answer(begin)
        expect(found is None, f"{what} has no size; it gave {found!r}")


@exercise("11b.2")
def check_crop_view(answer: Any) -> None:
    """A function of (memory, start, shape, box) that returns uint8 (height, width, 3)."""
    first, second = (np.arange(size, dtype=np.uint8) for size in (5 * 7 * 3, 6 * 4 * 3))
    memory = np.concatenate([first, second[::-1]])
    for start, shape, photo in ((0, (5, 7), first), (first.size, (6, 4), second[::-1])):
        whole = photo.reshape(*shape, 3)
        for top, left, height, width in ((0, 0, *shape), (1, 2, 3, 2), (4, 0, 1, 4)):
            found = answer(memory, start, shape, (top, left, height, width))
            crop = f"the box {(top, left, height, width)} of the photo {shape} at {start}"
            expect(found.shape == (height, width, 3), f"{crop} has shape {found.shape}")
            same = np.array_equal(found, whole[top : top + height, left : left + width])
            expect(same, f"{crop} has the wrong pixels")
            expect(np.shares_memory(found, memory), f"{crop} was copied")


@exercise("11b.4")
def check_own_gigabytes(answer: Any) -> None:
    """A pair: the frame that lk.collect_sizes gives for your photos, and a number, in GB."""
    sizes, found_gb = answer
    is_sizes = isinstance(sizes, pd.DataFrame) and {"width", "height"} <= set(sizes)
    expect(is_sizes, f"a {type(sizes).__name__} is not a frame from lk.collect_sizes")
    sides = sizes[["width", "height"]].dropna().to_numpy(float)
    expect(len(sides), "it states the size of no photo")
    shrunk = sides * np.minimum(1, 256 / sides.min(axis=1, keepdims=True))
    expected_gb = 3 * shrunk.prod(axis=1).sum() / 1e9
    ratio = float(found_gb) / expected_gb
    wrong = f"{float(found_gb):g} GB is {ratio:.2f} times the right value for these {len(sides)} photos"
    expect(abs(ratio - 1) <= 0.01, wrong)  # the longer side is rounded to whole pixels
