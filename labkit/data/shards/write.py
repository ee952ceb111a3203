"""Write the images of a store as WebDataset shards."""

import json
import os
import re
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from labkit.core import (
    atomic_path,
    check_same_job,
    claim_folder,
    read_record,
    remove_leftovers,
    require_int,
    write_record,
)
from labkit.core.mapping import map_items
from labkit.data.labels import check_same_classes
from labkit.data.shards.layout import Sample, sha256_of, write_tar
from labkit.data.shards.plan import Plan, make_plan
from labkit.data.stores import Store

MANIFEST = "manifest.json"
UNFINISHED = "unfinished"  # folder of the settings and of a row for each finished shard, until there is a manifest

_SETTINGS = "settings.json"
_MANIFEST_KEYS, _ROW_KEYS = {"settings", "classes", "n_samples", "shards"}, {"name", "n_samples", "n_bytes", "sha256"}


def write_shards(
    store: Store,
    root: str | os.PathLike,
    *,
    max_count: int = 10_000,
    max_bytes: int = 256_000_000,
    seed: int | None = None,
    classes: Sequence[str] | None = None,
    engine: str = "local",
    num_workers: int | None = None,
    address: str | None = None,
    progress: bool = True,
) -> Path:
    """Pack the images of a store into tars that WebDataset, `labkit.read_shards` and Hugging Face `datasets` read.

    Each sample is two members: `<key>.cls` with the label, and `<key>.jpg`, the image byte for byte (dots in keys:
    `labkit.data.shards.layout.member_names`). `manifest.json`, written last, has the class names, and count, bytes and
    SHA-256 of each shard. The same images and settings give the same bytes, for any engine and number of workers. After
    a kill, a rerun verifies what is there and writes the rest.

    Args:
        store: The images.
        root: Folder to fill; made if missing.
        max_count: Most samples in a shard.
        max_bytes: Largest size of a shard's file; only a single image that is larger exceeds it.
        seed: Shuffle the images once, so that classes mix. None keeps the order of `store.keys()`.
        classes: Names that labels index into, as for `ImageDataset`; the manifest has them.
        engine, num_workers, address, progress: As in `labkit.map_items`; one item is one shard.

    Returns:
        `root` as a Path.

    Raises:
        ValueError: a limit is below 1, folders cannot be classes (see `ImageDataset`), or `root` holds something else;
            names the folder and the remedy.
        ItemErrors: some shards could not be written; the others are.

    Taught in: notebooks/08_shard_formats.ipynb
    """
    root, limits = Path(root), (require_int("max_count", max_count), require_int("max_bytes", max_bytes))
    plan = make_plan(store, *limits, seed, classes, progress)
    settings = {"max_count": max_count, "max_bytes": max_bytes, "seed": seed, "names_and_sizes_sha256": plan.digest}
    known_rows = _take_up(root, settings, plan.classes)
    items = [(name, samples, known_rows.get(name)) for name, samples in plan.shards.items()]
    rows = map_items(
        partial(_make_shard, store, root), items, engine=engine, num_workers=num_workers, address=address,
        progress=progress, key=lambda item: item[0], description="shards", unit="shard",
    )  # fmt: skip
    _finish(root, settings, plan, rows)
    return root


def read_manifest(text: bytes, name: str) -> dict:
    """A manifest's content: `settings`, `classes`, `n_samples`, and `shards` with `name n_samples n_bytes sha256`.

    Raises:
        ValueError: it is not a manifest; names it.
    """
    try:
        content = json.loads(text)
        has_entries = content.keys() >= _MANIFEST_KEYS and isinstance(content["classes"], list)
        if has_entries and all(map(_is_row, content["shards"])):
            return content
        cause = "entries are missing, or a shard is not a file in its folder"
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        cause = str(error)
    raise ValueError(f"{name} is not a manifest of shards ({cause}): choose another folder, or write the shards again")


def _is_row(row: dict) -> bool:
    """Whether it has the entries of a shard, and names a file in its folder."""
    return row.keys() >= _ROW_KEYS and re.fullmatch(r"shard-\d{6,}\.tar", str(row["name"])) is not None


def _take_up(root: Path, settings: dict, classes: list[str]) -> dict[str, dict]:
    """Rows of the shards that earlier runs wrote, by name. Raises ValueError if `root` holds another set."""
    manifest = root / MANIFEST
    if manifest.exists():
        content = read_manifest(manifest.read_bytes(), str(manifest))
        check_same_classes(str(root), content["classes"], classes, "choose another folder, or remove this one")
        check_same_job(root, content["settings"], settings, what="shards")
        rows = content["shards"]
    else:
        claim_folder(root, f"{UNFINISHED}/{_SETTINGS}", settings, what="shards")
        rows = filter(_is_row, map(read_record, (root / UNFINISHED).glob("shard-*.json")))
    known_rows = {row["name"]: row for row in rows}
    _remove_leftovers(root)
    return known_rows


def _remove_leftovers(root: Path) -> None:
    """Remove half-written files of runs that were killed; a run that goes on keeps its own."""
    remove_leftovers(root)
    remove_leftovers(root / UNFINISHED)


def _make_shard(store: Store, root: Path, item: tuple[str, list[Sample], dict | None]) -> dict:
    """Write one shard, unless it is there as its known row says; returns its row of the manifest."""
    name, samples, known = item
    path = root / name
    if known and path.is_file() and path.stat().st_size == known["n_bytes"] and sha256_of(path) == known["sha256"]:
        return known
    with atomic_path(path) as partial_path:
        write_tar(partial_path, samples, store)
        size = partial_path.stat().st_size
        digest = sha256_of(partial_path)
        row = {"name": name, "n_samples": len(samples), "n_bytes": size, "sha256": digest}
        if known and row != known:
            raise ValueError(f"{path} was made of other images: choose another folder, or remove this one")
    write_record(root / UNFINISHED / f"{path.stem}.json", row)
    return row


def _finish(root: Path, settings: dict, plan: Plan, rows: list[dict]) -> None:
    _remove_leftovers(root)  # again: a worker that was killed may have died only now
    if not (root / MANIFEST).exists():
        n_samples = sum(row["n_samples"] for row in rows)
        content = {"settings": settings, "classes": plan.classes, "n_samples": n_samples, "shards": rows}
        write_record(root / MANIFEST, content, indent=1)
    shutil.rmtree(root / UNFINISHED, ignore_errors=True)
