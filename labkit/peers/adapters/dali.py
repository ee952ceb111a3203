"""NVIDIA DALI: a graph of native operators, on the CPU's threads or on the GPU.

Source: https://docs.nvidia.com/deeplearning/dali/user-guide/docs/examples/use_cases/pytorch/resnet50/pytorch-resnet50.html
(decoder and crop in one operator, resize, mirror and normalize in another).
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from labkit.peers.peer import AREA, MEAN, PART, RATIO, STD, Work, pip_peer


@lru_cache(maxsize=1)
def _loader(work: Work, device: str) -> Iterable:
    return _Epochs(work, device)


class _Epochs:
    """Like DALI's own iterator for PyTorch, but an epoch starts only when it is asked for.

    DALI's iterator decodes the first batches of the next epoch behind the last one of this epoch: in the time of
    whatever runs then, and before the clock of their own epoch starts.
    """

    def __init__(self, work: Work, device: str):
        self._work, self._device, self._pipeline = work, device, None

    def __iter__(self) -> Iterator[tuple]:
        pipeline, self._pipeline = self._pipeline, None  # a pipeline left within an epoch cannot be used again
        is_new = pipeline is None
        if pipeline is None:
            pipeline = _make_pipeline(self._work, self._device)
            pipeline.build()
        lengths, n_ahead = self._batch_lengths(pipeline), pipeline.prefetch_queue_depth
        for _ in range(1 if is_new else min(n_ahead, len(lengths))):  # the first call fills the queue
            pipeline.schedule_run()
        for number, length in enumerate(lengths):
            images, labels = (from_dlpack(output.as_tensor())[:length] for output in pipeline.share_outputs())
            pipeline.release_outputs()
            if number + n_ahead < len(lengths):
                pipeline.schedule_run()
            yield images.permute(0, 3, 1, 2), labels.squeeze(-1)
        self._pipeline = pipeline

    def _batch_lengths(self, pipeline: Any) -> list[int]:
        """Images in each batch, without those that pad the last one."""
        n_images, batch_size = pipeline.reader_meta("photos")["epoch_size"], self._work.batch_size
        return [min(batch_size, n_images - start) for start in range(0, n_images, batch_size)]


def _make_pipeline(work: Work, device: str) -> Any:
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(
        batch_size=work.batch_size,
        num_threads=max(1, work.num_workers),
        device_id=0 if device == "gpu" else None,
        seed=work.seed,
        exec_dynamic=True,  # hands over its memory instead of a copy
    )
    def photos() -> tuple:
        files, labels = fn.readers.file(
            name="photos",
            file_root=str(work.root),
            shuffle_after_epoch=True,  # shuffles all photos; random_shuffle only mixes those in a buffer
            shuffle_after_epoch_seed=work.seed,
            pad_last_batch=True,  # so that an epoch begins with a batch
        )
        decoding = {"device": "mixed" if device == "gpu" else "cpu", "output_type": types.RGB}
        images = fn.decoders.image_random_crop(files, random_area=AREA, random_aspect_ratio=RATIO, **decoding)
        images = fn.resize(images, size=[work.size, work.size], interp_type=types.INTERP_LINEAR, antialias=True)
        mirror = fn.random.coin_flip(probability=0.5)
        if not work.is_float:
            return fn.flip(images, horizontal=mirror), labels
        mean, std = ([255 * value for value in values] for values in (MEAN, STD))
        options = {"dtype": types.FLOAT, "output_layout": "HWC", "mean": mean, "std": std}
        return fn.crop_mirror_normalize(images, mirror=mirror, **options), labels

    return photos()


_dali_peer = partial(pip_peer, package="nvidia-dali-cuda130", modules=("nvidia.dali",), decodes=PART)
_ON_CPU = _dali_peer(
    "DALI",
    loader=partial(_loader, device="cpu"),
    decoder="libjpeg-turbo",
    note="decodes and crops in one step: only the crop's part of a JPEG is decoded where that is possible",
)
_ON_GPU = _dali_peer(
    "DALI (GPU)",
    loader=partial(_loader, device="gpu"),
    decoder="nvJPEG",
    note="nvJPEG decodes, and the GPU resizes, flips and keeps the batches; CPU threads read and parse",
)
PEERS_HERE = (_ON_CPU, _ON_GPU) if torch.cuda.is_available() else (_ON_CPU,)
