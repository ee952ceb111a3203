"""SPDL: a pipeline of threads, which runs FFmpeg's decoder and filters or any functions that release the GIL.

Source: https://facebookresearch.github.io/spdl/latest/best_practice.html, and, for the rows that decode with other
libraries, https://facebookresearch.github.io/spdl/latest/getting_started/execution_models.html ("MTP": threads in a
subprocess, which leave the training's process its GIL).
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate
from torchvision.transforms import v2

from labkit.peers.adapters.torchvision import decode_file, output_steps, tensor_transform
from labkit.peers.peer import Work, labeled_photos, pip_peer

_epoch_numbers = count()


def _loader(work: Work) -> Iterable:
    from spdl.pipeline import PipelineBuilder

    order = random.Random(f"{work.seed} {next(_epoch_numbers)}")
    photos = [(str(path), label, order.getrandbits(64)) for path, label in labeled_photos(work)]
    order.shuffle(photos)
    _use_one_thread()
    num_threads, finish = max(1, work.num_workers), v2.Compose([v2.Identity(), *output_steps(work)])
    pipeline = (
        PipelineBuilder()
        .add_source(photos)
        .aggregate(work.batch_size)
        .pipe(partial(_load_batch, size=work.size, finish=finish), concurrency=num_threads)
        .add_sink(num_threads)
        # By default SPDL leaves out what cannot be loaded. This queue is the one with the lower latency.
        .build(num_threads=num_threads, max_failures=0, use_thread_output_queue=True)
    )
    return _run_pipeline(pipeline)


def _run_pipeline(pipeline: Any) -> Iterator[tuple]:
    with pipeline.auto_stop():
        yield from pipeline


def _load_batch(photos: list[tuple[str, int, int]], size: int, finish: Callable[[Tensor], Tensor]) -> tuple:
    """Convert all frames at once, as SPDL's best practices say; its `load_image_batch` would crop all images alike."""
    import spdl.io

    frames = [_decode_crop(path, random.Random(seed), size) for path, _, seed in photos]
    images = spdl.io.to_torch(spdl.io.convert_frames(frames)).permute(0, 3, 1, 2)
    return finish(images), torch.tensor([label for _, label, _ in photos])


def _decode_crop(path: str, draw: random.Random, size: int) -> Any:
    import spdl.io

    packets = spdl.io.demux_image(path)
    top, left, height, width = _draw_crop(packets.height, packets.width, draw)
    filters = [f"crop={width}:{height}:{left}:{top}", "hflip"][: 1 + (draw.random() < 0.5)]
    filters.append(f"scale={size}:{size}:flags=bilinear")
    return spdl.io.decode_packets(packets, filter_desc=spdl.io.get_video_filter_desc(filter_desc=",".join(filters)))


def _draw_crop(height: int, width: int, draw: random.Random) -> tuple[int, int, int, int]:
    """Top, left, height and width of a crop, drawn as torchvision's RandomResizedCrop draws it."""
    for _ in range(10):
        area = height * width * draw.uniform(0.08, 1.0)
        ratio = math.exp(draw.uniform(math.log(3 / 4), math.log(4 / 3)))
        crop_height, crop_width = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < crop_height <= height and 0 < crop_width <= width:
            return draw.randint(0, height - crop_height), draw.randint(0, width - crop_width), crop_height, crop_width
    crop_height, crop_width = min(height, round(width * 4 / 3)), min(width, round(height * 4 / 3))
    return (height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width


class _ShuffledPhotos:
    """Paths and labels in another order in each iteration, in the process where the pipeline runs."""

    def __init__(self, work: Work):
        self._photos, self._order = labeled_photos(work), random.Random(work.seed)

    def __iter__(self) -> Iterator[tuple]:
        photos = list(self._photos)
        self._order.shuffle(photos)
        return iter(photos)


def _decode_with_turbojpeg(path: str) -> Tensor:
    import simplejpeg

    with open(path, "rb") as file:
        return torch.from_numpy(simplejpeg.decode_jpeg(file.read(), "RGB")).permute(2, 0, 1)


def _load_photo(
    decode: Callable[[str], Tensor], transform: Callable[[Tensor], Tensor], photo: tuple
) -> tuple[Tensor, int]:
    path, label = photo
    return transform(decode(str(path))), label


def _use_one_thread() -> None:
    torch.set_num_threads(1)  # the pipeline's threads are the parallelism


@lru_cache(maxsize=1)
def _load_in_subprocess(work: Work, decode: Callable[[str], Tensor]) -> Iterable:
    from spdl.pipeline import PipelineBuilder, run_pipeline_in_subprocess

    num_threads = max(1, work.num_workers)
    config = (
        PipelineBuilder()
        .add_source(_ShuffledPhotos(work))
        .pipe(partial(_load_photo, decode, tensor_transform(work)), concurrency=num_threads)
        .aggregate(work.batch_size)
        .pipe(default_collate)
        .add_sink(num_threads)
        .get_config()
    )
    options = {"max_failures": 0, "use_thread_output_queue": True, "initializer": _use_one_thread}
    return run_pipeline_in_subprocess(config, num_threads=num_threads + 1, mp_context="forkserver", **options)


_spdl_peer = partial(
    pip_peer,
    package="spdl",
    published="ImageNet 1.74 times as fast as with DataLoader, with 38 % less CPU time, "
    "https://arxiv.org/abs/2504.20067: on many cores, where feeding worker processes costs more than on few",
)
PEERS_HERE = (
    _spdl_peer(
        "SPDL with torchvision",
        modules=("spdl.pipeline",),
        loader=partial(_load_in_subprocess, decode=decode_file),
        decoder="torchvision",
        note="threads in a subprocess decode and transform with torchvision",
    ),
    _spdl_peer(
        "SPDL with turbojpeg",
        modules=("spdl.pipeline", "simplejpeg"),
        loader=partial(_load_in_subprocess, decode=_decode_with_turbojpeg),
        decoder="libjpeg-turbo",
        note="threads in a subprocess decode with libjpeg-turbo, transform with torchvision; ignores EXIF orientation",
    ),
    _spdl_peer(
        "SPDL",
        debian="ffmpeg",
        modules=("spdl.io", "spdl.pipeline"),
        loader=_loader,
        decoder="FFmpeg",
        note="FFmpeg decodes whole images and scales them bilinearly, with one filter graph per image; ignores EXIF "
        "orientation, rounds crops to even pixels where chroma is subsampled, and fills the rest of a cut file gray",
    ),
)
