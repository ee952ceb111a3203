"""Build a pixel file: make its parts in a folder beside it, then join them under its name."""

import contextlib
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np

from labkit.core import PackedStrings, atomic_path, check_same_job, file_lock, foreign_names, require_int, sibling_path
from labkit.core.mapping import ItemErrors, check_engine, map_items
from labkit.data.decoders import load_decoder
from labkit.data.labels import check_same_classes, labels_of
from labkit.data.pixels.format import Contents, Origin, PixelError, read_head
from labkit.data.pixels.parts import Part, fill_in_head, make_part, pixels_start, plan_parts
from labkit.data.stores import Store, open_store

_WHOLE = "whole.pixels"
_OWN_NAMES = re.compile(r"(part-\d{6,}|whole)\.pixels|\.\d+-[0-9a-f]{8}\.partial")
_COPY_BYTES = 1 << 24


def build_pixels(
    source: Store | str | os.PathLike,
    path: str | os.PathLike,
    short_side: int,
    decoder: str,
    classes: Sequence[str] | None,
    options: dict,
) -> None:
    """What `PixelStore.build` does; `options` are those of `map_items`."""
    require_int("short_side", short_side)
    check_engine(options["engine"], options["num_workers"], options["address"])
    load_decoder(decoder)  # an unknown or a missing one is one error here, not one for each image
    store = source if isinstance(source, Store) else open_store(source)
    path = Path(path).absolute()  # other processes may have another working folder
    origin, parts = plan_parts(store, short_side, decoder)
    if not parts:
        raise PixelError(f"{path} is not built: the source holds no image")
    keys = PackedStrings(key for part in parts for key in part.keys)
    classes, labels = labels_of(keys, classes, source=store)
    contents = Contents(keys, labels, classes)
    folder = sibling_path(path, ".parts")
    with file_lock(sibling_path(path, ".lock", hidden=True)):
        if foreign := foreign_names(folder, _is_own_name):  # the folder will be removed
            raise PixelError(f"{folder} holds {foreign[0]!r}, which no build wrote: move it, or choose another path")
        if not _is_built(path, origin, contents):
            _make_parts(store, folder, parts, options)
            _join_parts(path, folder, origin, parts, contents)
        _remove_parts(folder)


def _is_built(path: Path, origin: Origin, contents: Contents) -> bool:
    """Whether `path` holds these very pixels and labels. Raises PixelError where it holds anything else."""
    if not path.exists():
        return False
    head, remedy = read_head(path), "choose another path, or remove it"
    found, asked = asdict(head.origin), asdict(origin)
    is_same_source = found.pop("digest") == asked.pop("digest")
    if found == asked and not is_same_source:
        found, asked = {"source": "another"}, {"source": "this one"}
    check_same_job(path, found, asked, what="pixels", remedy=remedy, error=PixelError)
    check_same_classes(str(path), head.index.contents.classes, contents.classes, remedy, error=PixelError)
    if not np.array_equal(head.index.contents.labels, contents.labels):
        raise PixelError(f"{path} has other labels, those of an earlier version of labkit: {remedy}")
    return True


def _make_parts(store: Store, folder: Path, parts: list[Part], options: dict) -> None:
    failures_by_part = map_items(partial(make_part, store, folder), parts, description="pixels", unit="part", **options)
    failures = {key: text for each in failures_by_part for key, text in each.items()}
    if failures:
        raise ItemErrors(failures, [None] * sum(len(part.keys) for part in parts))


def _join_parts(path: Path, folder: Path, origin: Origin, parts: list[Part], contents: Contents) -> None:
    """Join all parts in one file, which is synced to disk before it gets its name."""
    indices = [read_head(folder / part.name).index for part in parts]
    shapes, crcs = (np.concatenate([getattr(index, name) for index in indices]) for name in ("shapes", "crcs"))
    with atomic_path(folder / _WHOLE) as half, open(half, "wb") as file:
        file.seek(pixels_start(contents))
        for part, index in zip(parts, indices, strict=True):
            with open(folder / part.name, "rb", buffering=0) as part_file:
                part_file.seek(int(index.offsets[0]))
                _append(file, part_file)
        fill_in_head(file, origin, contents, shapes, crcs)
        file.flush()
        os.fsync(file.fileno())
    (folder / _WHOLE).replace(path)


def _append(file: BinaryIO, part_file: BinaryIO) -> None:
    """Append the rest of a part, by a copy inside the kernel if that is possible."""
    with contextlib.suppress(AttributeError, OSError):
        while os.copy_file_range(part_file.fileno(), file.fileno(), _COPY_BYTES):
            pass
    shutil.copyfileobj(part_file, file, _COPY_BYTES)  # what the kernel did not copy
    file.flush()  # the kernel writes behind Python's buffer


def _is_own_name(name: str) -> bool:
    return _OWN_NAMES.fullmatch(name) is not None


def _remove_parts(folder: Path) -> None:
    """Remove the parts, and what killed runs left."""
    if folder.exists():
        for name in filter(_is_own_name, os.listdir(folder)):
            (folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # a dying worker of a killed run may still write there
            folder.rmdir()
