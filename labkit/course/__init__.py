"""What only the notebooks need: results, predictions, exercises, claims, servers, parts of a loader.

`from labkit import course` gives these names, and its modules `ladder` and `peers`. Each is imported on
first use, as those of `lk.`; what a training script needs is there.
"""

from importlib import import_module
from typing import Any

_NAMES = {
    "course.accuracy": ["accuracy_of_rungs"],
    "course.builds_pixels": ["flips_each", "normalizes_bytes", "reads_rgb", "scaled_decode"],
    "course.builds_storage": ["depth_in_meters", "index_of_tar", "shuffle_buffer"],
    "course.builds_workers": ["cores_of_a_process", "draws_of_a_sample", "shared_names"],
    "course.builds_measuring": ["judge_load_batch", "judge_wait_share"],
    "course.builds_prepared": ["jpeg_sizes", "packed_pixels", "restart_markers"],
    "course.builds_device": ["copies_ahead", "draws_anew", "mixes_without_waiting"],
    "course.builds_training": ["mended_loader", "peer_adapter", "training_plan"],
    "course.exercises": ["check", "own_runs", "predict"],
    "course.ledger": ["claims"],
    "course.oracles": ["broken_files", "conformance", "oracle_files", "plot_pictures"],
    "course.readbacks": ["count_readbacks"],
    "course.results": ["result"],
    "course.servers": ["DISKS", "serve_folder", "serve_s3"],
    "course.starting": ["where_to_start"],
    "course.training": ["copied_ahead", "make_step", "training_now"],
    "data.samples": ["make_depth"],
    "loading.augment": ["agreement"],
    "measure.plots": ["plot_timeline", "put_legend_below", "write_title"],
    "measure.statistics": ["InstabilityWarning"],
    "measure.usage": ["tree_memory"],
    "peers.check": ["make_pictures"],
    "peers.registry": ["PEERS", "Peer", "compare_peers", "plot_peers"],
    "peers.ranking": ["comparisons", "stored_runs"],
    "simulation.simulated_device": ["SimulatedDevice"],
    "util.files": ["ScratchFolder"],
    "util.machine": ["photo_root"],
}
_MODULES = {"ladder": "labkit.course.ladder", "peers": "labkit.peers.registry"}
_HOME = {name: f"labkit.{module}" for module, names in _NAMES.items() for name in names}

__all__ = sorted([*_HOME, *_MODULES])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _HOME:
        raise AttributeError(f"module 'labkit.course' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
