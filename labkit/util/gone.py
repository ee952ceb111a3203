"""What this version no longer has, and what to use instead: whoever asks for it is told in one line.

A row is kept for one version.
"""

from collections.abc import Mapping
from typing import Any

from labkit.errors import WrongTypeError

_DECODERS = "notebook 02 compares decoders"
_ADAPTER = "write an adapter for it, as in notebook 13, and pass it to course.compare_peers(peers=[...])"
_CROPS = "time it with lk.compare, over lk.BatchLoader(crops=...) and a loader of your own"

# As it is written, names of peers in lower case -> what to use instead.
GONE = {
    "labkit plan": "notebook 14 does its arithmetic by hand, and `lk.plan` does it in Python",
    "labkit reference": "on a machine with a CUDA device, the notebooks run on it: `python -m labkit tour --store`",
    "labkit watch --trace": "export a trace for Perfetto by torch.profiler: prof.export_chrome_trace(path)",
    "labkit peers --only torchcodec": _DECODERS,
    "labkit peers --only pil draft": _DECODERS,
    "labkit peers --only opencv reduced": _DECODERS,
    "labkit peers --only torchdata nodes": _ADAPTER,
    "labkit peers --only grain": _ADAPTER,
    "labkit peers --only datago": _ADAPTER,
    "labkit peers --only mosaicml-streaming": _ADAPTER,
    "labkit peers --class tiled-uint8": "time a folder that lk.tile_jpegs wrote: --own FOLDER",
    "labkit peers --class multicrop-uint8": _CROPS,
    "labkit peers --class multicrop-tiled-uint8": _CROPS,
    "BatchLoader(num_processes=)": "start one process per GPU, or load with lk.make_loader, which has workers",
    "BatchLoader(fit=)": 'pad or stretch by a v2 transform, with lk.ImageDataset and lk.make_loader; "crop" is how '
    "train=False looks at an image",
    "BatchLoader(fill=)": "pad by v2.Pad(..., fill=), with lk.ImageDataset and lk.make_loader",
    "BatchLoader(memory_format=)": "batches are channels last; images.contiguous() on the device makes planes of them",
    "BatchLoader(targets=)": "give masks, boxes and points as torchvision.tv_tensors, by a data set of your own and "
    "lk.make_loader",
    "read_shards(cache=)": "copy the shards to a local folder first, as by `aws s3 sync`, and read that",
}


def told_if_gone(asked: str) -> str:
    """What to use instead of something that is gone, in a sentence; of anything else, nothing."""
    return f"`{asked}` is gone: {GONE[asked]}" if asked in GONE else ""


def refuse_arguments(function: str, given: Mapping[str, Any]) -> None:
    """TypeError for arguments that a function does not have, or no longer has."""
    for name in given:
        told = told_if_gone(f"{function}({name}=)")
        raise WrongTypeError(told or f"{function}() got an unexpected keyword argument {name!r}")
