"""The checks of the exercises in notebooks 03 to 07: workers, transforms, the device."""

import random
from itertools import product
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

from labkit.measure import summarize
from labkit.pipeline import count_repeats
from labkit.teach.exercises import (
    exercise,
    expect,
    expect_frame,
    expect_pair,
    expect_runs,
    frame_exercise,
    number_exercise,
)

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
def check_normalised(answer: Any) -> None:
    """A function of a uint8 batch (N, 3, H, W) that returns it as float32, scaled and normalised."""
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
    apart = max(lead, 1 / lead)
    expect(apart >= 1.5, f"the two are {apart:.2f}x apart; at least 1.5x is needed, whichever wins")


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
    from labkit.measure import count_readbacks

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
