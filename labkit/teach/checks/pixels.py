"""The checks of the exercises in notebook 11: decoding once."""

from typing import Any

import numpy as np

from labkit.teach.exercises import exercise, judge, near, reaches


@exercise("11.1")
def gigabytes_of_raw_pixels(answer: Any) -> str | None:
    """A number, in GB."""
    return near(answer, 1_281_167 * 256 * 341 * 3 / 1e9)


@exercise("11.2")
def epochs_until_it_has_paid(answer: Any) -> str | None:
    """A whole number of epochs."""
    return near(answer, 4, tolerance=0)


@exercise("11.3")
def a_crop_without_copying(answer: Any) -> str | None:
    """A function of (memory, start, shape, box) that returns uint8 (height, width, 3)."""
    first, second = (np.arange(size, dtype=np.uint8) for size in (5 * 7 * 3, 6 * 4 * 3))
    memory = np.concatenate([first, second[::-1]])
    for start, shape, photo in ((0, (5, 7), first), (first.size, (6, 4), second[::-1])):
        whole = photo.reshape(*shape, 3)
        for top, left, height, width in ((0, 0, *shape), (1, 2, 3, 2), (4, 0, 1, 4)):
            found = answer(memory, start, shape, (top, left, height, width))
            what = f"the box {(top, left, height, width)} of the photo {shape} at {start}"
            if found.shape != (height, width, 3):
                return f"{what} became {found.shape}"
            if not np.array_equal(found, whole[top : top + height, left : left + width]):
                return f"{what} has other pixels"
            if not np.shares_memory(found, memory):
                return f"{what} was copied"
    return None


@exercise("11.4")
def factor_of_the_smallest_crop(answer: Any) -> str | None:
    """A number: pixels a side after, over pixels a side before."""
    return near(answer, 224 / (0.08 * 256 * 341) ** 0.5)


@exercise("11.5")
def a_preparation_that_pays(answer: Any) -> str | None:
    """A frame from lk.compare of at least two preparations of the same photos."""
    return judge(answer, rounds=3, widest=0.5) or reaches(answer, 1.2)
