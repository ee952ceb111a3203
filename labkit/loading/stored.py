"""From the pixels of a `PixelStore` to rows of a batch."""

from collections.abc import Callable
from functools import partial

import numpy as np

from labkit.data.pixels import PixelStore
from labkit.loading.crops import SIDES, TOP_LEFT, Crop, CropPolicies
from labkit.loading.rows import Batch


class StoredImages:
    """The images of a `PixelStore`, or some of them, as rows of batches.

    Args:
        store: What holds the pixels.
        numbers: int (N,): the images in the store that the indices of a batch count in. None: all of them.
        policies: Which crops of each are written.
    """

    smallest_task = 8  # images; for fewer, a task costs more than it saves

    def __init__(self, store: PixelStore, numbers: np.ndarray | None, policies: CropPolicies):
        self._store, self._numbers, self._policies = store, numbers, policies

    def filler(self, batch: Batch) -> Callable[..., list[int]]:
        """What writes some rows of a batch, in any thread, and returns those that stay empty: none.

        The crops are drawn here, for all at once: NumPy takes as long for one image as for all, and in between releases
        the GIL, which the threads that resize would then have to take back each time.
        """
        numbers = batch.indices if self._numbers is None else self._numbers[batch.indices]
        draws = self._policies.draw(batch.epoch, batch.indices, batch.occurrences)
        crops = self._policies.of(draws, self._store.shapes[numbers])
        return partial(self._fill, batch, numbers, crops, self._policies.boxes(crops))

    def _fill(self, batch: Batch, numbers: np.ndarray, crops: np.ndarray, boxes: np.ndarray, rows: slice) -> list[int]:
        bottoms, rights = (boxes[rows, TOP_LEFT] + boxes[rows, SIDES]).T
        tops = boxes[rows, 0] * self._policies.train  # a whole photo is resized from its corner on
        self._store.read_ahead(numbers[rows].tolist(), zip(tops, bottoms - tops, strict=True))
        images = zip(numbers[rows].tolist(), bottoms.tolist(), rights.tolist(), crops[rows].tolist(), strict=True)
        for position, (number, bottom, right, crops_of_image) in enumerate(images, rows.start):
            pixels = self._store.pixels(number)[:bottom, :right]
            for number_of_crop, crop in enumerate(map(Crop._make, crops_of_image)):
                batch.write(position, number_of_crop, pixels, crop[:4], crop)
        return []
