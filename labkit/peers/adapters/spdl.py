"""SPDL: FFmpeg's decoder and filters, in a pipeline of threads."""

import math
import random
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import count
from typing import Any

import torch

from labkit.peers.peer import Work, labelled_photos, pip_peer

_epoch_numbers = count()


def _loader(work: Work) -> Iterable:
    from spdl.pipeline import PipelineBuilder

    order = random.Random(f"{work.seed} {next(_epoch_numbers)}")
    photos = [(str(path), label, order.getrandbits(64)) for path, label in labelled_photos(work)]
    order.shuffle(photos)
    num_threads = max(1, work.num_workers)
    pipeline = (
        PipelineBuilder()
        .add_source(photos)
        .aggregate(work.batch_size)
        .pipe(partial(_load_batch, size=work.size), concurrency=num_threads)
        .add_sink(num_threads)
        # By default SPDL leaves out what cannot be loaded. This queue is the one with the lower latency.
        .build(num_threads=num_threads, max_failures=0, use_thread_output_queue=True)
    )
    return _run_pipeline(pipeline)


def _run_pipeline(pipeline: Any) -> Iterator[tuple]:
    with pipeline.auto_stop():
        yield from pipeline


def _load_batch(photos: list[tuple[str, int, int]], size: int) -> tuple:
    """Convert all frames at once, as SPDL's best practices say; its `load_image_batch` would crop all images alike."""
    import spdl.io

    frames = [_decode_crop(path, random.Random(seed), size) for path, _, seed in photos]
    images = spdl.io.to_torch(spdl.io.convert_frames(frames))
    return images.permute(0, 3, 1, 2), torch.tensor([label for _, label, _ in photos])


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


PEERS_HERE = (
    pip_peer(
        "SPDL",
        "spdl",
        debian="ffmpeg",
        modules=("spdl.io", "spdl.pipeline"),
        loader=_loader,
        note="FFmpeg decodes whole images and scales them bilinearly, with one filter graph per image; ignores EXIF "
        "orientation, rounds crops to even pixels where chroma is subsampled, and fills the rest of a cut file gray",
    ),
)
