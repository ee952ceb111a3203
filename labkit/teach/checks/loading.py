"""The checks of the exercises in notebooks 03 to 07: workers, transforms, the device."""

import random
from typing import Any

import numpy as np
import pandas as pd
import torch

from labkit.measure import summarize
from labkit.teach.exercises import exercise, judge, near, reaches


@exercise("03.1")
def workers_that_feed_a_gpu(answer: Any) -> str | None:
    """A whole number of workers."""
    return near(answer, 10, tolerance=0)


@exercise("03.2")
def memory_of_touched_lists(answer: Any) -> str | None:
    """A number, in GB."""
    return near(answer, 8 * 0.5)


@exercise("03.3")
def a_draw_that_no_worker_changes(answer: Any) -> str | None:
    """A function of (seed, epoch, index) that returns a number from 0 to 1."""
    triples = [(seed, epoch, index) for seed in range(3) for epoch in range(3) for index in range(30)]
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    draws = [float(answer(*triple)) for triple in triples]
    if [float(answer(*triple)) for triple in reversed(triples)] != draws[::-1]:
        return "called again in another order, it returned other numbers"
    if (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) != before:
        return "it changes the state of a global generator, and with it what the model draws"
    if len(set(draws)) < len(draws):
        return f"{len(triples)} different (seed, epoch, index) gave only {len(set(draws))} different numbers"
    if not (min(draws) >= 0 and max(draws) <= 1 and 0.4 < np.mean(draws) < 0.6):
        return f"numbers spread over 0 to 1 are wanted; these lie between {min(draws):.2f} and {max(draws):.2f}"
    return None


@exercise("03.4")
def workers_that_pay(answer: Any) -> str | None:
    """A frame from lk.compare whose baseline is a loader without workers."""
    return judge(answer, rounds=3, widest=0.5) or reaches(answer, 1.2)


@exercise("04.1")
def megabytes_saved(answer: Any) -> str | None:
    """A number, in MB (1e6 bytes)."""
    return near(answer, 64 * 3 * 224 * 224 * 3 / 1e6)


@exercise("04.2")
def flip_each_image(answer: Any) -> str | None:
    """A function of a uint8 batch (N, 3, H, W) that returns the batch with each image flipped or not."""
    batch = torch.arange(64 * 3 * 2 * 4, dtype=torch.int32).remainder(251).to(torch.uint8).view(64, 3, 2, 4)
    given = batch.clone()
    found = answer(given)
    if not torch.equal(given, batch):
        return "it changes the batch that it was given"
    if found.shape != batch.shape or found.dtype != torch.uint8:
        return f"{tuple(batch.shape)} of uint8 became {tuple(found.shape)} of {found.dtype}"
    same = (found == batch).flatten(1).all(1)
    flipped = (found == batch.flip(3)).flatten(1).all(1)
    if not bool((same | flipped).all()):
        return f"{int((~(same | flipped)).sum())} of 64 images are neither the picture nor its mirror image"
    share = float(flipped.float().mean())
    return None if 0.2 < share < 0.8 else f"{share:.0%} of the images of a batch are flipped; about half is wanted"


@exercise("04.3")
def normalise_a_batch(answer: Any) -> str | None:
    """A function of a uint8 batch (N, 3, H, W) that returns it as float32, scaled and normalised."""
    batch = torch.arange(2 * 3 * 4 * 5, dtype=torch.int32).mul(2).to(torch.uint8).view(2, 3, 4, 5)
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    expected = (batch.numpy() / 255 - mean[:, None, None]) / std[:, None, None]
    found = answer(batch)
    if found.dtype != torch.float32 or found.shape != batch.shape:
        return f"{tuple(found.shape)} of {found.dtype} came back; {tuple(batch.shape)} of torch.float32 is wanted"
    off = float(np.abs(found.numpy() - expected).max())
    return None if off < 1e-5 else f"a value is off by {off:.3g}"


@exercise("04.4")
def an_order_that_matters(answer: Any) -> str | None:
    """A frame from lk.compare of two orders of the same transforms."""
    return judge(answer, rounds=5, widest=0.2)


@exercise("05.1")
def different_draws(answer: Any) -> str | None:
    """A whole number of images."""
    return near(answer, 250, tolerance=0)


@exercise("05.2")
def array_to_tensor_without_copying(answer: Any) -> str | None:
    """A function of a uint8 array (H, W, 3) that returns a tensor (3, H, W)."""
    pixels = np.arange(2 * 5 * 3, dtype=np.uint8).reshape(2, 5, 3)
    found = answer(pixels)
    if tuple(found.shape) != (3, 2, 5):
        return f"(2, 5, 3) became {tuple(found.shape)}"
    if not np.array_equal(found.numpy().transpose(1, 2, 0), pixels):
        return "the pixels are not the same"
    return None if found.data_ptr() == pixels.ctypes.data else "it copies: the tensor lies in memory of its own"


@exercise("05.3")
def where_one_library_wins(answer: Any) -> str | None:
    """A frame with the variants "v2" and "albumentations"."""
    if not isinstance(answer, pd.DataFrame) or not {"v2", "albumentations"} <= set(answer.get("variant", ())):
        return 'it takes a frame with the variants "v2" and "albumentations"'
    wrong = judge(answer, rounds=5, widest=0.3)
    if wrong:
        return wrong
    lead = float(summarize(answer, baseline="v2").loc["albumentations", "speedup"])
    apart = max(lead, 1 / lead)
    return None if apart >= 1.5 else f"the two are {apart:.2f}x apart; 1.5x is wanted, whichever wins"


@exercise("06.1")
def share_of_a_cut_rectangle(answer: Any) -> str | None:
    """A function of (top, bottom, left, right, height, width) that returns the image's own share."""
    for box in ((0, 10, 0, 20, 20, 40), (5, 20, 30, 40, 20, 40), (7, 7, 0, 40, 20, 40)):
        top, bottom, left, right, height, width = box
        wrong = near(answer(*box), 1 - (bottom - top) * (right - left) / (height * width))
        if wrong:
            return f"for {box}: {wrong}"
    return None


@exercise("06.2")
def mean_share_of_the_stronger_image(answer: Any) -> str | None:
    """A number from 0 to 1."""
    return near(answer, 0.75)


@exercise("06.3")
def brightness_without_asking(answer: Any) -> str | None:
    """A function of a float batch (N, 3, H, W), values 0 to 1, that returns it brightened, image by image."""
    from labkit.measure import count_readbacks

    batch = torch.full((64, 3, 4, 5), 0.5)
    found, readbacks = count_readbacks(answer, batch)
    if readbacks:
        return f"it reads {readbacks} values back to the host: on a GPU each one waits"
    if found.shape != batch.shape:
        return f"{tuple(batch.shape)} became {tuple(found.shape)}"
    factors = found.flatten(1) / 0.5
    if float((factors - factors[:, :1]).abs().max()) > 1e-5:
        return "within one image the factor varies"
    low, high, different = float(factors.min()), float(factors.max()), len(factors[:, 0].unique())
    if different < 32:
        return f"64 images got {different} different factors"
    return None if low > 0.59 and high < 1.41 else f"factors from {low:.2f} to {high:.2f}; 0.6 to 1.4 are wanted"


@exercise("06.4")
def a_cost_on_the_device(answer: Any) -> str | None:
    """A frame from lk.compare with at least two variants of an augmentation of a batch."""
    return judge(answer, rounds=5, widest=0.3)


@exercise("07.1")
def nothing_overlaps(answer: Any) -> str | None:
    """A number, in ms."""
    return near(answer, 75)


@exercise("07.2")
def all_overlaps(answer: Any) -> str | None:
    """A number, in ms."""
    return near(answer, 40)


@exercise("07.3")
def a_faster_gpu(answer: Any) -> str | None:
    """A number: the old step time over the new."""
    return near(answer, 40 / 30)


@exercise("07.4")
def what_the_prefetcher_lacks(answer: Any) -> str | None:
    """The name of a tensor's method, as a string."""
    if "record_stream" in str(answer):
        return None
    return f"{answer!r} does not tell the allocator which stream still reads the memory"


@exercise("07.5")
def overlap_that_pays(answer: Any) -> str | None:
    """A frame from lk.compare whose variants load and compute."""
    return judge(answer, rounds=3, widest=0.5) or reaches(answer, 1.05)
