"""NVIDIA DALI: a graph of native operators, on the CPU's threads or on the GPU."""

from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from typing import Any

import torch

from labkit.peers.peer import JPEG_FILES, Peer, Work


@lru_cache(maxsize=1)
def _loader(work: Work, device: str) -> Iterable:
    return _Epochs(work, device)


class _Epochs:
    """As DALI's own iterator for PyTorch, except that an epoch is not begun before somebody asks for it.

    That one decodes the first batches of the next epoch behind the last one of this: in the time of whatever runs
    then, and before the clock of the epoch that they belong to starts.
    """

    def __init__(self, work: Work, device: str):
        self._work, self._device, self._pipeline = work, device, None

    def __iter__(self) -> Iterator[tuple]:
        pipeline, self._pipeline = self._pipeline, None  # one that is left within an epoch is of no more use
        first = pipeline is None
        if first:
            pipeline = _pipeline(self._work, self._device)
            pipeline.build()
        lengths, n_ahead = self._lengths(pipeline), pipeline.prefetch_queue_depth
        for _ in range(1 if first else min(n_ahead, len(lengths))):  # the first call fills the queue
            pipeline.schedule_run()
        for number, length in enumerate(lengths):
            images, labels = (torch.from_dlpack(output.as_tensor()) for output in pipeline.share_outputs())
            pipeline.release_outputs()
            if number + n_ahead < len(lengths):
                pipeline.schedule_run()
            yield images[:length].permute(0, 3, 1, 2), labels[:length].squeeze(-1)
        self._pipeline = pipeline

    def _lengths(self, pipeline: Any) -> list[int]:
        """Images in each batch, without those that fill up the last one."""
        n_images, batch_size = pipeline.reader_meta("photos")["epoch_size"], self._work.batch_size
        return [min(batch_size, n_images - start) for start in range(0, n_images, batch_size)]


def _pipeline(work: Work, device: str) -> Any:
    from nvidia.dali import fn, pipeline_def, types

    on_gpu = device == "gpu"

    @pipeline_def(
        batch_size=work.batch_size,
        num_threads=max(1, work.num_workers),
        device_id=0 if on_gpu else None,
        seed=work.seed,
        exec_dynamic=True,  # hands over its memory instead of a copy
    )
    def photos() -> tuple:
        files, labels = fn.readers.file(
            name="photos",
            file_root=str(work.root),
            shuffle_after_epoch=True,  # all photos; random_shuffle mixes what lies in a buffer
            shuffle_after_epoch_seed=work.seed,
            pad_last_batch=True,  # so that an epoch begins with a batch
        )
        images = fn.decoders.image_random_crop(
            files,
            device="mixed" if on_gpu else "cpu",
            output_type=types.RGB,
            random_area=[0.08, 1.0],
            random_aspect_ratio=[3 / 4, 4 / 3],
        )
        images = fn.resize(images, size=[work.size, work.size], interp_type=types.INTERP_LINEAR, antialias=True)
        images = fn.flip(images, horizontal=fn.random.coin_flip(probability=0.5))
        return images, labels

    return photos()


_INSTALL = "python -m pip install nvidia-dali-cuda130"
_ON_CPU = Peer(
    name="DALI",
    source=JPEG_FILES,
    antialias=True,
    install=_INSTALL,
    modules=("nvidia.dali",),
    loader=partial(_loader, device="cpu"),
    note="decoding and cropping fused: only the crop's part of a JPEG is decoded where that can be done",
)
_ON_GPU = Peer(
    name="DALI (GPU)",
    source=JPEG_FILES,
    antialias=True,
    install=_INSTALL,
    modules=("nvidia.dali",),
    loader=partial(_loader, device="gpu"),
    note="decoded by nvJPEG, resized and flipped on the GPU, where its batches stay; CPU threads read and parse",
)
PEERS_HERE = (_ON_CPU, _ON_GPU) if torch.cuda.is_available() else (_ON_CPU,)
