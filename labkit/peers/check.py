"""`check_peer`: does a loader do the work that it is timed on? Pictures show, in any crop of them, what was done.

Each picture has its own color (the same chroma in every pixel), a brightness that rises to the right and, less, to the
bottom, and grain. A crop keeps the color. The rise of brightness across it is the crop's share of the width and height;
a falling brightness shows a flip. The grain that is left distinguishes a filter that averages from one that samples.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from labkit.errors import PeerError
from labkit.peers.peer import AREA, MEAN, RATIO, RAW_PIXELS, STD, Peer, Work
from labkit.util.files import atomic_path

N_PICTURES = 70
WIDTH, HEIGHT = 800, 600
CLASSES = ("amber", "blue", "coral")

_RISE_X, _RISE_Y = 60.0, 44.0  # of the brightness across the whole picture
_GRAIN_SD = 8.0
_COLUMNS, _ROWS = 10, 7  # grid of colors
_COLOR_STEP = 10.0  # between neighbors in the grid, of 255
_MAX_COLOR_ERROR = 3.0  # encoders and filters change a color by less than 1


def picture_key(number: int) -> str:
    """File name of a picture, in the folder of its class."""
    return f"{CLASSES[number % len(CLASSES)]}/{number:03d}.jpg"


def make_probe_pictures(root: Path) -> Path:
    """Write the pictures that are missing, as JPEG with 4:4:4 chroma and quality 95."""
    from PIL import Image

    grain = np.random.default_rng(0).normal(0, _GRAIN_SD, (HEIGHT, WIDTH))
    x, y = np.arange(WIDTH) / WIDTH - 0.5, np.arange(HEIGHT) / HEIGHT - 0.5
    brightness = 128 + _RISE_X * x[None, :] + _RISE_Y * y[:, None] + grain
    for number, (cb, cr) in enumerate(_make_colors()):
        path = root / picture_key(number)
        if not path.exists():
            red, blue = 1.402 * cr, 1.772 * cb
            green = -(0.299 * red + 0.114 * blue) / 0.587
            pixels = np.stack([brightness + offset for offset in (red, green, blue)], -1).clip(0, 255).astype(np.uint8)
            with atomic_path(path) as partial:
                Image.fromarray(pixels).save(partial, "JPEG", quality=95, subsampling="4:4:4")
    return root


def _make_colors() -> np.ndarray:
    """Chroma (Cb, Cr) of each picture, around 0."""
    columns = (np.arange(_COLUMNS) - (_COLUMNS - 1) / 2) * _COLOR_STEP
    rows = (np.arange(_ROWS) - (_ROWS - 1) / 2) * _COLOR_STEP
    return np.array([(cb, cr) for cr in columns for cb in rows])


def read_crops(images: Tensor) -> pd.DataFrame:
    """Read what uint8 crops (N, 3, H, W) of the pictures show.

    Returns:
        One row per image: `number` of the picture, -1 for a color that no picture has; `width` and `height`, the shares
        of the picture's; `flipped`, left to right; `upside_down`, which is not part of the work; and `grain`, the
        standard deviation of the grain that is left.
    """
    # Use all pixels: with a sample of them, the grain of a small crop causes a larger error than `check_peer` accepts.
    pixels = images.cpu().to(torch.float32)
    red, green, blue = pixels.unbind(1)
    brightness = 0.299 * red + 0.587 * green + 0.114 * blue
    colors = torch.stack([(blue - brightness) / 1.772, (red - brightness) / 1.402], -1).mean((1, 2)).numpy()
    errors = np.abs(colors[:, None] - _make_colors()[None]).max(-1)
    # A fitted plane: its rise over the whole width and height, and what is left.
    y, x = (torch.arange(side) / side for side in brightness.shape[-2:])
    x, y = x - x.mean(), (y - y.mean())[:, None]
    level = brightness - brightness.mean((1, 2), keepdim=True)
    rise_x = (level * x).mean((1, 2)) / x.square().mean()
    rise_y = (level * y).mean((1, 2)) / y.square().mean()
    grain = (level - rise_x[:, None, None] * x - rise_y[:, None, None] * y).std((1, 2))
    return pd.DataFrame({
        "number": np.where(errors.min(1) <= _MAX_COLOR_ERROR, errors.argmin(1), -1),
        "width": abs(rise_x) / _RISE_X, "height": abs(rise_y) / _RISE_Y,
        "flipped": rise_x < 0, "upside_down": rise_y < 0, "grain": grain,
    })  # fmt: skip


_TOLERANCE = 1.06  # crops have whole pixels, and are read from brightness, of which small ones have fewer levels
_N_RAW_EPOCHS = 4  # a raw format may hold crops cut beforehand: more epochs show how few
_MAX_REPEATED = 0.2  # of the pictures: two crops of each
_DISTINCT, _MIN_DISTINCT = 0.01, 0.8  # width and height, as shares of the picture; 0.94 to 0.99 with torchvision
_MEAN_AREA = 0.43  # of RandomResizedCrop: a large crop that does not fit the picture is drawn again
_BYTE_TOLERANCE = 1.0
# Of the pixels of all crops, red, green and blue, with torchvision. Of single epochs the mean varies by about 1, the
# deviations by 1, and seldom 3.
_MEAN, _MAX_MEAN_ERROR = 127.0, 6.0
_DEVIATIONS, _MAX_DEVIATION_ERROR = (44.0, 27.0, 39.0), 0.15
_MAX_ANTIALIASED_GRAIN = 3.6  # in crops of twice the output's size; sampling leaves 5


def _expect(condition: Any, message: str) -> None:
    if not condition:
        raise PeerError(message)


def check_peer(peer: Peer, work: Work) -> dict[str, float]:
    """Let a loader do the work on pictures that show what was done to them.

    Reads two epochs, of raw formats four. In each, every picture must come exactly once (with `drops_last`, the last
    short batch may be missing), with its folder's label, in batches of the right shape and type and with the right
    colors; floats must be normalized by the mean and deviation of the work. The crops must be distributed as those of
    RandomResizedCrop, with half of them flipped, and differ from each other and between epochs.

    Args:
        peer: The loader.
        work: What it will be asked to do. The pictures are made in its `scratch`; its photos are not read.

    Returns:
        `images` in two epochs, mean `area` and `flipped` share of the crops, and `grain`: how much grain is left in
        crops that were shrunk to half or less.

    Raises:
        PeerError: the loader does not do the work; says what is wrong.

    Taught in: notebooks/13_peers.ipynb
    """
    work = replace(work, root=make_pictures(work), scratch=work.scratch / "check" / peer.name)
    if peer.prepare:
        peer.prepare(work)
    n_epochs = _N_RAW_EPOCHS if peer.source == RAW_PIXELS else 2
    read = [[_read_batch(batch, work) for batch in peer.loader(work)] for _ in range(n_epochs)]
    _expect(all(read), "gives no batch")
    if work.is_float:  # first: else wrong values would look like wrong colors
        _check_floats([moments for epoch in read for _, moments in epoch])
    epochs = [pd.concat([crops for crops, _ in epoch]) for epoch in read]
    for epoch in epochs:
        _check_complete(epoch, work, peer)
    _expect(list(epochs[0]["number"]) != list(epochs[1]["number"]), "two epochs have the same order")
    return _check_crops(peer, work, epochs) | {"images": 2 * sum(map(len, epochs)) / n_epochs}


def make_pictures(work: Work) -> Path:
    """Make the pictures for `check_peer`, unless they are there, and return their folder."""
    return make_probe_pictures(work.scratch / "check" / "pictures")


def _read_batch(batch: Any, work: Work) -> tuple[pd.DataFrame, tuple[Tensor, Tensor]]:
    """What a batch shows, with its labels; and its images' means and mean squares, (N, 3). Refuses a wrong form."""
    is_pair = isinstance(batch, list | tuple) and len(batch) == 2 and type(batch[0]) is Tensor
    _expect(is_pair, f"gives {type(batch).__name__}, not a pair (images, labels) with a tensor of images")
    images = batch[0].cpu()
    labels = torch.as_tensor(batch[1]).cpu().reshape(-1).numpy().copy()  # FFCV reuses a batch's memory
    _expect(images.dtype == getattr(torch, work.dtype), f"gives {images.dtype}, not {work.dtype}")
    found, shape = tuple(images.shape), (3, work.size, work.size)
    is_batch = len(found) == 4 and found[1:] == shape and 1 <= found[0] <= work.batch_size
    _expect(is_batch, f"gives batches of shape {found}, not (at most {work.batch_size}, {shape})")
    _expect(len(labels) == len(images), f"gives {len(labels)} labels with {len(images)} images")
    pixels = images.float()
    if work.is_float:  # to 0 to 255, as they were before `v2.ToDtype(scale=True)` and `v2.Normalize`
        mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
        pixels = 255 * (images * std + mean)
        low, high = pixels.min().item(), pixels.max().item()
        is_allowed = low >= -_BYTE_TOLERANCE and high <= 255 + _BYTE_TOLERANCE
        _expect(is_allowed, f"floats are not normalized: undone, they are {low:.0f} to {high:.0f}, not within 0 to 255")
    return read_crops(pixels).assign(label=labels), (pixels.mean((2, 3)), pixels.square().mean((2, 3)))


def _check_floats(moments: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Refuse a wrong mean or deviation: crops of all pictures together are gray, and of known contrast."""
    mean, square = (torch.cat(values).mean(0) for values in zip(*moments, strict=True))
    deviation, usual = (square - mean.square()).sqrt(), torch.tensor(_DEVIATIONS)
    is_usual_mean = abs(mean - _MEAN).max() <= _MAX_MEAN_ERROR
    found, wanted = (", ".join(f"{value:.0f}" for value in values) for values in (deviation, usual))
    _expect(
        is_usual_mean and abs(deviation / usual - 1).max() <= _MAX_DEVIATION_ERROR,
        "floats are not normalized: undone, mean and deviation of red, green and blue are "
        f"{mean.mean():.0f} and {found}, not about {_MEAN:.0f} and {wanted}",
    )


def _check_complete(epoch: pd.DataFrame, work: Work, peer: Peer) -> None:
    """Refuse an epoch in which a picture is missing or comes twice, has another label, or comes by its name."""
    numbers = epoch["number"].to_numpy()
    n_unknown = int((numbers < 0).sum())
    _expect(not n_unknown, f"{n_unknown} of {len(numbers)} images have colors that no photo has")
    counts = np.bincount(numbers, minlength=N_PICTURES)
    n_droppable = N_PICTURES % work.batch_size if peer.drops_last else 0
    for chosen, n_allowed, what in (
        (counts > 1, 0, "came more than once in an epoch"), (counts == 0, n_droppable, "never came in an epoch")
    ):  # fmt: skip
        found = np.flatnonzero(chosen)
        if len(found) > n_allowed:
            raise PeerError(f"{len(found)} of {N_PICTURES} images, the first {picture_key(found[0])}, {what}")
    n_wrong = int(np.count_nonzero(numbers % len(CLASSES) != epoch["label"]))
    _expect(not n_wrong, f"{n_wrong} of {len(numbers)} labels are not those of the image's folder")
    names = [picture_key(number) for number in numbers]
    sortedness = np.corrcoef(np.argsort(np.argsort(names)), np.arange(len(names)))[0, 1]
    _expect(sortedness <= 0.95, "images come in the order of their names: nothing is shuffled")


def _check_crops(peer: Peer, work: Work, epochs: Sequence[pd.DataFrame]) -> dict[str, float]:
    """Refuse crops unlike RandomResizedCrop's; an epoch has one of each picture."""
    crops = pd.concat(epochs)
    areas, ratios = crops["width"] * crops["height"], crops["width"] * WIDTH / (crops["height"] * HEIGHT)
    _expect(not crops["upside_down"].any(), "images are turned upside down")
    for name, values, (low, high) in (("area", areas, AREA), ("aspect ratio", ratios, RATIO)):
        least, most = values.min(), values.max()
        is_allowed = low / _TOLERANCE <= least and most <= high * _TOLERANCE
        _expect(is_allowed, f"crops have {name} {least:.2f} to {most:.2f}, not {low:.2f} to {high:.2f}")
        varies = most - least >= 0.3 * (high - low)
        _expect(varies, f"the {name} of crops hardly varies: {least:.2f} to {most:.2f}")
    area, flipped = float(areas.mean()), float(crops["flipped"].mean())
    is_usual = abs(area - _MEAN_AREA) <= 0.1
    _expect(is_usual, f"crops cover {area:.0%} of the image on average, not about {_MEAN_AREA:.0%}")
    _expect(0.3 < flipped < 0.7, f"{flipped:.0%} of the images are flipped, not about half of them")
    for first, second in combinations([epoch.set_index("number")["width"] for epoch in epochs], 2):
        difference = (first - second).dropna().abs()  # of the pictures that both have
        _expect((difference < 0.005).mean() <= _MAX_REPEATED, "two epochs cut the same crops")
    n_distinct = len((crops[["width", "height"]] / _DISTINCT).round().drop_duplicates())
    _expect(n_distinct >= _MIN_DISTINCT * len(crops), f"few distinct crops: {n_distinct} among {len(crops)}")
    shrunk = (crops["width"] > 2 * work.size / WIDTH) & (crops["height"] > 2 * work.size / HEIGHT)  # to half or less
    grain = float(crops.loc[shrunk, "grain"].median())
    is_coarse = peer.antialias and peer.source != RAW_PIXELS and grain > _MAX_ANTIALIASED_GRAIN
    _expect(not is_coarse, f"does not antialias: grain of {grain:.1f} is left where crops were shrunk")
    return {"area": area, "flipped": flipped, "grain": grain}
