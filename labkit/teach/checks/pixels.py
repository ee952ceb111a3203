"""The checks of the exercises in notebook 11: decoding once."""

from typing import Any

import numpy as np

from labkit.teach.exercises import exercise, frame_exercise, number_exercise

number_exercise("11.1", "A number, in GB.", 1_281_167 * 256 * 341 * 3 / 1e9)
number_exercise("11.2", "A whole number of epochs.", 4, tolerance=0)
number_exercise("11.4", "A number: pixels a side after, over pixels a side before.", 224 / (0.08 * 256 * 341) ** 0.5)
frame_exercise(
    "11.5", "A frame from lk.compare of at least two preparations of the same photos.",
    rounds=3, widest=0.5, speedup=1.2,
)  # fmt: skip


@exercise("11.3")
def check_crop_view(answer: Any) -> str | None:
    """A function of (memory, start, shape, box) that returns uint8 (height, width, 3)."""
    first, second = (np.arange(size, dtype=np.uint8) for size in (5 * 7 * 3, 6 * 4 * 3))
    memory = np.concatenate([first, second[::-1]])
    for start, shape, photo in ((0, (5, 7), first), (first.size, (6, 4), second[::-1])):
        whole = photo.reshape(*shape, 3)
        for top, left, height, width in ((0, 0, *shape), (1, 2, 3, 2), (4, 0, 1, 4)):
            found = answer(memory, start, shape, (top, left, height, width))
            crop = f"the box {(top, left, height, width)} of the photo {shape} at {start}"
            if found.shape != (height, width, 3):
                return f"{crop} has shape {found.shape}"
            if not np.array_equal(found, whole[top : top + height, left : left + width]):
                return f"{crop} has the wrong pixels"
            if not np.shares_memory(found, memory):
                return f"{crop} was copied"
    return None
