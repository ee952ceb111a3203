"""Write the images of a store as WebDataset shards."""

import contextlib
import json
import os
import shutil
from functools import partial
from pathlib import Path

from labkit.core import atomic_path, is_file_key, remove_leftovers, write_atomic
from labkit.core.mapping import map_items
from labkit.data.shards.layout import sha256_of, write_tar
from labkit.data.shards.plan import Plan, PlannedShard, make_plan
from labkit.data.stores import Store

MANIFEST = "manifest.json"
UNFINISHED = "unfinished"  # folder of what is known until the manifest is written

_SETTINGS = "settings.json"
_CONTENT, _ROW = {"settings", "classes", "n_samples"}, {"name", "n_samples", "n_bytes", "sha256"}
_REMEDY = "choose another folder, or remove this one"


def write_shards(
    store: Store,
    root: str | os.PathLike,
    *,
    max_count: int = 10_000,
    max_bytes: int = 256_000_000,
    seed: int | None = None,
    engine: str = "local",
    num_workers: int | None = None,
    address: str | None = None,
    progress: bool = True,
) -> Path:
    """Pack the images of a store into tars that WebDataset, `labkit.read_shards` and Hugging Face `datasets` read.

    Each sample is two members of a tar, `<key>.cls` with the label (an index into the sorted folder names) and
    `<key>.jpg`, the image byte for byte; `labkit.data.shards.layout.member_names` says what becomes of dots in keys.
    `manifest.json`, written last, has the class names, and count, bytes and SHA-256 of each shard.

    The same images and settings give the same bytes, for any engine and number of workers. A shard has its final name
    only when it is whole. After an interruption, or a kill, a rerun checks the checksums of what is there and makes
    what is missing.

    Args:
        store: Where the images lie.
        root: Folder to fill; made if missing.
        max_count: Most samples in a shard.
        max_bytes: Largest size of a shard's file; only an image that is larger by itself exceeds it.
        seed: Shuffle the images once before they are written, so that neighbours are not of one class. None keeps the
            order of `store.keys()`.
        engine, num_workers, address: As in `labkit.map_items`; one item is one shard.
        progress: Show a live bar.

    Returns:
        `root` as a Path.

    Raises:
        ValueError: a limit below 1, or `root` holds something else; names the folder and the remedy.
        ItemErrors: some shards could not be written; the others are, and a rerun goes on from there.

    Taught in: notebooks/08_shard_formats.ipynb
    """
    root = Path(root)
    if max_count < 1 or max_bytes < 1:
        raise ValueError(f"max_count={max_count}, max_bytes={max_bytes}: at least 1 is wanted")
    plan = make_plan(store, max_count, max_bytes, seed, progress)
    settings = {"max_count": max_count, "max_bytes": max_bytes, "seed": seed, "names_and_sizes_sha256": plan.digest}
    rows = _claim(root, settings)
    _remove_leftovers(root)
    items = [(shard, rows.get(shard.name)) for shard in plan.shards]
    rows = map_items(
        partial(_make_shard, store, root), items, key=_name_of, engine=engine, num_workers=num_workers,
        address=address, progress=progress, description="shards", unit="shard",
    )  # fmt: skip
    _remove_leftovers(root)  # again: a worker that was killed may have been dying until now
    _finish(root, settings, plan, rows)
    return root


def read_manifest(text: bytes, name: str) -> dict:
    """A manifest's content: `settings`, `classes`, `n_samples`, and `shards` with `name n_samples n_bytes sha256`.

    Raises:
        ValueError: it is none; names it.
    """
    try:
        content = json.loads(text)
        complete = all(row.keys() >= _ROW for row in content["shards"]) and content.keys() >= _CONTENT
        foreign = [row["name"] for row in content["shards"] if complete and not _is_name(row["name"])]
        if complete and not foreign:
            return content
        cause = f"{foreign[0]!r} is no file in its folder" if foreign else "it lacks entries"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        cause = str(error)
    raise ValueError(f"{name} is not a manifest of shards ({cause}): choose another folder, or write the shards again")


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name == os.path.basename(name) and is_file_key(name)


def _claim(root: Path, settings: dict) -> dict[str, dict]:
    """What is known of the shards in `root`, by name, after making sure that the folder is this set's."""
    if (root / MANIFEST).exists():
        content = read_manifest((root / MANIFEST).read_bytes(), str(root / MANIFEST))
        _check_same(root, content["settings"], settings)
        return {row["name"]: row for row in content["shards"]}
    claim = root / UNFINISHED / _SETTINGS
    if claim.exists():
        _check_same(root, _unfinished(claim), settings)
        rows = [_unfinished(path) for path in claim.parent.glob("shard-*.json")]
        return {row["name"]: row for row in rows if row.keys() >= _ROW and _is_name(row["name"])}
    if root.exists() and any(name != UNFINISHED for name in os.listdir(root)):
        raise ValueError(f"{root} is not empty and holds no shards: choose another folder")
    write_atomic(claim, json.dumps(settings).encode())
    return {}


def _unfinished(path: Path) -> dict:
    """What an earlier run wrote down."""
    with contextlib.suppress(ValueError, RecursionError):
        content = json.loads(path.read_bytes())
        if isinstance(content, dict):
            return content
    raise ValueError(f"{path} is damaged: {_REMEDY}")


def _check_same(root: Path, found: dict, settings: dict) -> None:
    if found != settings:
        differing = {name: (found.get(name), value) for name, value in settings.items() if found.get(name) != value}
        listed = ", ".join(f"{name} {there!r}, not {here!r}" for name, (there, here) in differing.items())
        raise ValueError(f"{root} holds other shards ({listed}): {_REMEDY}")


def _remove_leftovers(root: Path) -> None:
    """Half-written files of runs that were killed; one that still runs keeps its own."""
    remove_leftovers(root)
    remove_leftovers(root / UNFINISHED)


def _name_of(item: tuple[PlannedShard, dict | None]) -> str:
    return item[0].name


def _make_shard(store: Store, root: Path, item: tuple[PlannedShard, dict | None]) -> dict:
    """Write one shard, unless it is there as its row says; returns its row of the manifest."""
    shard, known = item
    path = root / shard.name
    if known and path.is_file() and path.stat().st_size == known["n_bytes"] and sha256_of(path) == known["sha256"]:
        return known
    with atomic_path(path) as partial_path:
        write_tar(partial_path, shard.samples, store)
        row = _row(shard, partial_path)
        if known and row != known:
            raise ValueError(f"the store's images are not those that {path} was made of: {_REMEDY}")
    write_atomic(root / UNFINISHED / f"{path.stem}.json", json.dumps(row).encode())
    return row


def _row(shard: PlannedShard, path: Path) -> dict:
    return {
        "name": shard.name,
        "n_samples": len(shard.samples),
        "n_bytes": path.stat().st_size,
        "sha256": sha256_of(path),
    }


def _finish(root: Path, settings: dict, plan: Plan, rows: list[dict]) -> None:
    n_samples = sum(row["n_samples"] for row in rows)
    content = {"settings": settings, "classes": plan.classes, "n_samples": n_samples, "shards": rows}
    text = json.dumps(content, indent=1).encode()
    if not (root / MANIFEST).exists():
        write_atomic(root / MANIFEST, text)
    shutil.rmtree(root / UNFINISHED, ignore_errors=True)
