"""Judges of the exercises that build how a file becomes RGB, and bytes a network's floats; how a large JPEG is shrunk.

Each takes the reader's function, and raises AssertionError with a sentence that says what is wrong.
"""

import contextlib
import io
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image, JpegImagePlugin
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.transforms import v2

from labkit.course.exercises import NotAnswered, _expect
from labkit.course.oracles import broken_files, oracle_files
from labkit.data.decode import decode
from labkit.util.pictures import encode_image

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, of values from 0 to 1
_ARITHMETIC = {"add", "sub", "rsub", "mul", "div", "addcmul", "addcdiv"}
_MAX_DIFFERENCE = 2  # mean, of 255: libraries round and upsample colors differently


def reads_rgb(answer: Callable[[str], Tensor]) -> None:
    """Judge `read_rgb(path)`: every oracle file as `lk.decode` gives it, and an exception for a file cut off."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
        for name, data in oracle_files().items():
            path = Path(folder, name)
            path.write_bytes(data)
            _expect_pixels(name, answer(str(path)), decode(data), stored_bits=_bits_of(data))
        for name, data in broken_files().items():
            if not name.startswith("truncated"):
                continue
            path = Path(folder, name)
            path.write_bytes(data)
            try:
                answer(str(path))
                is_refused = False
            except Exception:
                is_refused = True
            _expect(is_refused, f"{name}: the file is cut off and was read all the same, in part gray: raise an error")


def _bits_of(data: bytes) -> int:
    return 16 if Image.open(io.BytesIO(data)).mode.startswith("I") else 8


def _expect_pixels(name: str, found: Any, right: Tensor, *, stored_bits: int) -> None:
    _expect(isinstance(found, Tensor), f"{name}: a {type(found).__name__} came back; return a tensor")
    _expect(found.dtype == torch.uint8, f"{name}: {found.dtype} came back; return uint8, of 16 bits the high byte")
    is_last = found.ndim == 3 and found.shape[-1] == 3 != len(found)
    _expect(not is_last, f"{name}: the channels come last, {tuple(found.shape)}; they come first in (3, H, W)")
    is_rgb = found.ndim == 3 and len(found) == 3
    _expect(is_rgb, f'{name}: the shape is {tuple(found.shape)}, not (3, H, W): use convert("RGB")')
    if _agree(found, right):
        return
    turns = [found.rot90(k, (1, 2)) for k in range(4)]
    turns += [turned.flip(2) for turned in turns]
    _expect(
        not any(_agree(turned, right) for turned in turns),
        f"{name}: the picture is turned or mirrored: apply the EXIF orientation",
    )
    is_white = stored_bits == 16 and found.float().mean() > 250
    _expect(not is_white, f"{name}: all is white: 16 bits were clipped to 255; keep their high byte")
    _expect(not _agree(found.flip(0), right), f"{name}: red and blue have changed places")
    raise AssertionError(f"{name}: these are not the pixels that lk.decode gives")


def _agree(found: Tensor, right: Tensor) -> bool:
    return found.shape == right.shape and (found.float() - right).abs().mean().item() <= _MAX_DIFFERENCE


_WHOLE, _ODD = (640, 480), (801, 600)  # pixels: 801 / 8 is rounded up
_CROPS = (  # photo; left, upper, right and lower edge; width and height asked for; n of the smallest n/8 that has them
    (_WHOLE, (40, 40, 600, 440), (70, 50), 1),
    (_WHOLE, (80, 0, 640, 480), (180, 120), 3),
    (_WHOLE, (300, 100, 460, 420), (60, 80), 3),
    (_WHOLE, (0, 200, 640, 300), (80, 60), 5),  # its height decides
    (_ODD, (1, 0, 801, 600), (88, 66), 1),  # up to the edges
)
_MAX_RESIZED = 5  # mean, of 255: the codec averages blocks, and a resize weighs its pixels otherwise


def scaled_decode(answer: Callable[[bytes, Any, Any], Any]) -> None:
    """Judge `scaled_crop(data, box, size)`: the crop of a full decode, resized, from as few decoded pixels as do."""
    for whole, box, size, eighths in _CROPS:
        photo = _photo(whole)
        data = encode_image(photo, "JPEG", quality=95)
        asked = f"crop {box} of {whole[0]} x {whole[1]} as {size}"
        with _decoded_sizes() as sizes:
            found = np.asarray(answer(data, box, size))
        _expect(found.shape == (*size[::-1], 3), f"{asked}: the shape is {found.shape}, not {(*size[::-1], 3)}")
        _expect(sizes, f"{asked}: decode with simplejpeg or Pillow; the check counts the pixels of these two")
        width, height = max(sizes)
        least = -(-whole[0] * eighths // 8), -(-whole[1] * eighths // 8)
        told = f"{width} x {height} pixels were decoded, and {least[0]} x {least[1]} are needed"
        cure = "the crop was enlarged, and is blurred; both sides need their pixels, and minima are rounded up"
        _expect(width >= least[0], f"{asked}: {told}: {cure}")
        expected = np.asarray(photo.resize(size, Image.Resampling.BILINEAR, box=box)).astype(int)
        is_crop = np.abs(found - expected).mean() <= _MAX_RESIZED
        told_box = "`box` counts pixels of the full photo: scale its edges by width and height, and do not round them"
        _expect(is_crop, f"{asked}: this is another part of the photo: {told_box}")
        is_full = (width, height) == whole
        _expect(width <= least[0], f"{asked}: right, but {'all ' * is_full}{told}: take the smallest n/8")


def _photo(size: tuple[int, int]) -> Image.Image:
    from skimage import data

    return Image.fromarray(data.coffee()).resize(size, Image.Resampling.LANCZOS)


@contextlib.contextmanager
def _decoded_sizes() -> Iterator[list[tuple[int, int]]]:
    """Width and height of every JPEG that simplejpeg or Pillow decodes meanwhile."""
    import simplejpeg

    sizes: list[tuple[int, int]] = []
    by_simplejpeg, by_pillow = simplejpeg.decode_jpeg, JpegImagePlugin.JpegImageFile.load

    def decode_jpeg(*args: Any, **kwargs: Any) -> Any:
        pixels = by_simplejpeg(*args, **kwargs)
        sizes.append((pixels.shape[1], pixels.shape[0]))
        return pixels

    def load(image: Any) -> Any:
        loaded = by_pillow(image)
        sizes.append(image.size)
        return loaded

    with (
        mock.patch.object(simplejpeg, "decode_jpeg", decode_jpeg),
        mock.patch.object(JpegImagePlugin.JpegImageFile, "load", load),
    ):
        yield sizes


def normalizes_bytes(answer: Callable[[Any, Any], nn.Module]) -> None:
    """Judge the module `NormalizeBytes(mean, std)`: torchvision's floats, by a factor and an offset that it keeps."""
    # Three of everything, so that no broadcast over a wrong axis raises.
    batch = torch.randint(256, (3, 3, 3, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    right = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])(batch)
    module, given = answer(MEAN, STD), batch.clone()
    halves = (0.5, 0.5, 0.5)
    _expect(isinstance(module, nn.Module), f"a {type(module).__name__} is no module: derive it from `torch.nn.Module`")
    with _Counted(batch.numel()) as counted:
        found = module(given)
    if found is ...:
        raise NotAnswered
    _expect(torch.equal(given, batch), "the batch of bytes was changed in place; leave it as it is")
    _expect(isinstance(found, Tensor), f"a {type(found).__name__} came back; return a tensor")
    _expect(found.dtype == torch.float32, f"{found.dtype} came back: make factor and offset float32")
    _expect(found.shape == right.shape, f"the shape is {tuple(found.shape)}, not {tuple(right.shape)}")
    _expect(
        torch.allclose(found, right, atol=1e-4),
        f"the first value is {found.flatten()[0]:.3f}, and torchvision's is {right.flatten()[0]:.3f}: mean and std are "
        "those of channels, so of shape (3, 1, 1), and of values from 0 to 1; the mean comes off before the division",
    )
    told = f"the values are right, but arithmetic goes over the batch {counted.n_passes} times"
    _expect(counted.n_passes <= 2, f"{told}: fold 255, mean and std into one factor and one offset")
    trained = "an optimizer over `parameters()` would train mean and std: keep factor and offset by `register_buffer`"
    _expect(not list(module.parameters()), trained)
    module, moved = answer(MEAN, STD).to("meta"), batch.to("meta")  # a device that refuses the CPU's tensors
    with _Counted(batch.numel()) as counted, suppress(RuntimeError):
        found = module(moved)
    is_own = torch.allclose(answer(halves, halves)(batch), batch / 127.5 - 1, atol=1e-4)
    _expect(is_own, f"with a mean and std of {halves}, it still takes ImageNet's: use those that are given")
    on_device = found.device.type == "meta" and not counted.n_copied
    _expect(on_device, "factor and offset stay on the CPU when the module moves: keep them by `register_buffer`")


class _Counted(TorchDispatchMode):
    """Counts arithmetic that goes over a whole batch, where a multiply-add is one; and copies."""

    def __init__(self, n_values: int):
        super().__init__()
        self.n_calls = self.n_passes = self.n_copied = 0
        self._n_values = n_values

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found, name = function(*args, **(kwargs or {})), function.overloadpacket.__name__.rstrip("_")
        self.n_calls += 1
        self.n_passes += name in _ARITHMETIC and isinstance(found, Tensor) and found.numel() >= self._n_values
        self.n_copied += name in ("_to_copy", "copy") and args[0].device != found.device
        return found


_N_FLIPPED, _N_CALLS = 256, 8
_WIDEST = 5 * 0.5 / (_N_FLIPPED * _N_CALLS) ** 0.5  # of a share around 1/2: five standard deviations


def flips_each(answer: Callable[[Tensor], Tensor]) -> None:
    """Judge `flip_each(batch)`: every image is the original or its mirror image, by a draw of its own."""
    batch = torch.randint(256, (_N_FLIPPED, 3, 2, 4), generator=torch.Generator().manual_seed(4)).to(torch.uint8)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        flipped = torch.stack([_flipped(answer, batch) for _ in range(_N_CALLS)])
    shares = flipped.float().mean(1)
    _expect(not set(shares.tolist()) <= {0.0, 1.0}, "all images of a batch are flipped, or none: draw for each image")
    share = shares.mean().item()
    _expect(abs(share - 0.5) < _WIDEST, f"{share:.0%} of the images are flipped, not half")
    _expect(
        not (flipped == flipped[0]).all(), "every call flips the same images: draw anew in each, and set no seed there"
    )
    agree = (flipped[:, 1:] == flipped[:, :-1]).float().mean().item()  # independent draws agree half of the time
    told = f"neighbors are not flipped independently: {agree:.0%} of the draws agree. Draw for each image"
    _expect(abs(agree - 0.5) < 1.5 * _WIDEST, told)


def _flipped(answer: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    """Which images are mirrored in one call, of which all else has to be right."""
    given, mirrored = batch.clone(), batch.flip(3)
    with _Counted(batch.numel()) as counted:
        found = answer(given)
    is_shaped = isinstance(found, Tensor) and found.shape == batch.shape
    _expect(is_shaped, "return a tensor of the shape that the batch has")
    _expect(found.dtype == batch.dtype, f"{found.dtype} came back; return {batch.dtype} as given")
    _expect(torch.equal(given, batch), "the batch that was given has changed; return a new one")
    is_flipped, is_same = ((found == wanted).flatten(1).all(1) for wanted in (mirrored, batch))
    told = "some are neither the original in their place nor its mirror image: flip along the width"
    _expect((is_flipped | is_same).all(), told)
    told = f"{counted.n_calls} operations for {len(batch)} images: flip without a loop, by torch.where"
    _expect(counted.n_calls < len(batch), told)
    return is_flipped
