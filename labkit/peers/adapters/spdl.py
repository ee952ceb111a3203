"""SPDL: FFmpeg's decoder and filters, in a pipeline of threads."""

import math
import random
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import count
from typing import Any

import torch

from labkit.peers.peer import JPEG_FILES, Peer, Work, labelled_photos

_epochs = count()


def _loader(work: Work) -> Iterable:
    from spdl.pipeline import PipelineBuilder

    order = random.Random(f"{work.seed} {next(_epochs)}")
    photos = [(str(path), label, order.getrandbits(64)) for path, label in labelled_photos(work)]
    order.shuffle(photos)
    num_threads = max(1, work.num_workers)
    pipeline = (
        PipelineBuilder()
        .add_source(photos)
        .aggregate(work.batch_size)
        .pipe(partial(_batch, size=work.size), concurrency=num_threads)
        .add_sink(num_threads)
        # Else what cannot be loaded is left out. The queue is the one of lower latency.
        .build(num_threads=num_threads, max_failures=0, use_thread_output_queue=True)
    )
    return _epoch(pipeline)


def _epoch(pipeline: Any) -> Iterator[tuple]:
    with pipeline.auto_stop():
        yield from pipeline


def _batch(photos: list[tuple[str, int, int]], size: int) -> tuple:
    """Frames become one tensor at once, as SPDL's guide to best practice says; `load_image_batch` crops all alike."""
    import spdl.io

    frames = [_frames(path, random.Random(seed), size) for path, _, seed in photos]
    images = spdl.io.to_torch(spdl.io.convert_frames(frames))
    return images.permute(0, 3, 1, 2), torch.tensor([label for _, label, _ in photos])


def _frames(path: str, draw: random.Random, size: int) -> Any:
    import spdl.io

    packets = spdl.io.demux_image(path)
    top, left, height, width = _random_crop(packets.height, packets.width, draw)
    filters = [f"crop={width}:{height}:{left}:{top}", "hflip"][: 1 + (draw.random() < 0.5)]
    filters.append(f"scale={size}:{size}:flags=bilinear")
    return spdl.io.decode_packets(packets, filter_desc=spdl.io.get_video_filter_desc(filter_desc=",".join(filters)))


def _random_crop(height: int, width: int, draw: random.Random) -> tuple[int, int, int, int]:
    """As torchvision's RandomResizedCrop draws it: top, left, height, width."""
    for _ in range(10):
        area = height * width * draw.uniform(0.08, 1.0)
        ratio = math.exp(draw.uniform(math.log(3 / 4), math.log(4 / 3)))
        own_height, own_width = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < own_height <= height and 0 < own_width <= width:
            return draw.randint(0, height - own_height), draw.randint(0, width - own_width), own_height, own_width
    own_height, own_width = min(height, round(width * 4 / 3)), min(width, round(height * 4 / 3))
    return (height - own_height) // 2, (width - own_width) // 2, own_height, own_width


PEERS_HERE = (
    Peer(
        name="SPDL",
        source=JPEG_FILES,
        antialias=True,
        install="apt-get install ffmpeg && python -m pip install spdl",
        modules=("spdl.io", "spdl.pipeline"),
        loader=_loader,
        note="FFmpeg decodes whole images and scales bilinearly, by a filter graph an image; EXIF orientation is not "
        "applied, crops are rounded to even pixels where chroma is subsampled, and the rest of a cut file is gray",
    ),
)
