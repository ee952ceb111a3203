"""labkit: how image data reaches a GPU in PyTorch, measured one step at a time.

`import labkit as lk` gives the names below. They are imported on first use (PEP 562), so that the command line
starts without loading torch.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOME = {
    "labkit.core.machine": ["Scale", "env_id", "environment", "photo_root", "scale", "usable_cores"],
    "labkit.measure.timing": ["VariantError", "compare"],
    "labkit.measure.frames": [
        "InstabilityWarning", "from_timeit", "from_timer", "load_frame", "save_frame", "summarize",
    ],
    "labkit.core.scratch": ["ScratchFolder"],
    "labkit.measure.stages": ["StageClock"],
    "labkit.measure.processes": ["tree_memory"],
    "labkit.measure.readbacks": ["count_readbacks"],
    "labkit.measure.replay": ["ReplayLoader"],
    "labkit.tuning.stalls": ["Diagnosis", "diagnose"],
    "labkit.measure.plots": [
        "plot_ladder", "plot_pareto", "plot_speedup", "plot_stalls", "plot_throughput", "plot_timeline",
    ],
    "labkit.data.decoders": ["DECODERS", "DecodeError", "decode", "missing_decoders"],
    "labkit.data.stores.folder": ["FolderStore", "Store", "open_store"],
    "labkit.data.tar.store": ["TarStore"],
    "labkit.data.stores.remote": ["HttpStore", "ObjectStore"],
    "labkit.data.stores.simulated": ["DISKS", "SimulatedStore"],
    "labkit.data.stores.local_servers": ["serve_folder", "serve_s3"],
    "labkit.data.shards.shuffling": ["ShardWarning", "read_shards", "shuffle_quality", "write_shards"],
    "labkit.data.depth.pairs": ["DepthPairs"],
    "labkit.data.samples.depth": ["make_depth"],
    "labkit.data.sizes.collect": ["collect_sizes"],
    "labkit.core.mapping.engines": ["ItemErrors", "map_items"],
    "labkit.data.extract.extract": ["extract_tars"],
    "labkit.data.pixels.store": ["PixelError", "PixelStore"],
    "labkit.data.blobs.pagecache": ["evict", "resident_fraction"],
    "labkit.data.datasets": ["ImageDataset", "PILDataset", "collate"],
    "labkit.core.strings": ["PackedStrings"],
    "labkit.data.samples.photos": ["make_photos"],
    "labkit.teach.conformance": ["broken_files", "child_exits", "conformance", "oracle_files"],
    "labkit.teach.conformance_plots": ["plot_conformance", "plot_pictures"],
    "labkit.pipeline.loader.config": ["LoaderConfig", "LoaderWarning"],
    "labkit.pipeline.loader.workers": ["WorkerDied"],
    "labkit.pipeline.loader.loader": ["Loader", "make_loader"],
    "labkit.pipeline.batch_loader.loader": ["BatchLoader"],
    "labkit.tuning.tuner": ["Tuned", "tune"],
    "labkit.pipeline.limits": ["decode_limit", "memcpy_limit"],
    "labkit.peers.registry": ["PEERS", "Peer", "Work", "compare_peers", "plot_peers"],
    "labkit.pipeline.seeding": ["count_repeats"],
    "labkit.pipeline.augment": ["RECIPES", "Recipe", "make_augment"],
    "labkit.pipeline.agreement": ["agreement", "drawn_crops"],
    "labkit.pipeline.mix": ["cutmix", "mixup"],
    "labkit.pipeline.prefetch": ["CUDAPrefetcher"],
    "labkit.pipeline.timeline": ["Stamped", "trace"],
    "labkit.pipeline.images": ["plot_images"],
    "labkit.teach.reference.runs": ["reference_runs", "show_reference"],
    "labkit.teach.predictions": ["predict", "predictions"],
    "labkit.teach.scores": ["Score", "plot_guesses", "score"],
    "labkit.teach.exercises": ["check"],
    "labkit.teach.claims.judging": ["claims"],
    "labkit.teach.claims.plots": ["plot_claims"],
    "labkit.teach.explore": ["explore"],
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'labkit' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))


def load_ipython_extension(shell) -> None:
    """`%load_ext labkit` gives the cell magic `%%variant`."""
    from labkit.lab.magic import VariantMagics

    shell.register_magics(VariantMagics)
