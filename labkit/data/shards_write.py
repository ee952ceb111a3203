"""Write the images of a store as WebDataset shards: tars whose bytes depend on the images and settings alone.

It is decided which image goes into which shard before the first byte is written. Each shard is then one item of
`map_items`, and `manifest.json`, written last, says that all of them are there.
"""

import hashlib
import io
import json
import os
import re
import shutil
import tarfile
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np

from labkit.data.image_formats import IMAGE_SUFFIXES
from labkit.data.labels import check_same_classes, labeled, sizes_of
from labkit.data.remote import as_store, reads_ahead
from labkit.data.stores import Store, change_times, changed_since
from labkit.errors import ArgumentError
from labkit.util.arguments import (
    MAX_FILE_VARIABLE,
    max_file_bytes,
    require_int,
    require_local_path,
    require_seed,
)
from labkit.util.files import (
    REMEDY,
    atomic_path,
    check_same_job,
    claim_folder,
    n_images,
    read_record,
    remove_leftovers,
    require_room,
    write_record,
)
from labkit.util.parallel import map_items
from labkit.util.process import progress_bar

MANIFEST = "manifest.json"
UNFINISHED = "unfinished"  # folder of the settings and of a row for each finished shard, until there is a manifest

# What labels are, as the manifest says in `labels`, unless they are class numbers; and the suffix of their members.
LABEL_SUFFIXES = {"classes": "cls", "numbers": "json"}

_MANIFEST_KEYS, _ROW_KEYS = {"settings", "classes", "n_samples", "shards"}, {"name", "n_samples", "n_bytes", "sha256"}
_MAX_PLAIN_NAME = 100  # longer names, and those that are not ASCII, take a pax record of their own


class Sample(NamedTuple):
    """One image of a store on its way into a shard: its key there, its name here, its size, its label as text.

    Attributes:
        label_suffix: Of the file that holds the label.
    """

    store_key: str
    member: str
    n_bytes: int
    label: str
    label_suffix: str

    @property
    def label_file(self) -> tuple[str, bytes]:
        """Name and data of the member that goes with the image."""
        return f"{self.member.rpartition('.')[0]}.{self.label_suffix}", self.label.encode(errors="surrogateescape")


def write_shards(
    store: Any,
    root: str | os.PathLike,
    *,
    max_count: int = 10_000,
    max_bytes: int = 256_000_000,
    seed: int | None = None,
    classes: Sequence[str] | None = None,
    labels: Any = None,
    keys: Iterable[str] | None = None,
    engine: str = "local",
    num_workers: int | None = None,
    address: str | None = None,
    progress: bool = True,
) -> Path:
    """Pack the images of a store into tars that WebDataset, `labkit.read_shards` and Hugging Face `datasets` read.

    Each sample is two members: `<key>.cls` with the label, and `<key>.jpg`, the image byte for byte (dots in keys:
    `labkit.data.shards_write.member_names`). Labels that are not one integer for each image are in a `<key>.json`
    instead. `manifest.json`, written last, has the class names, and count, bytes and SHA-256 of each shard. The
    same images, labels and settings give the same bytes, for any engine and number of workers. After a kill, a rerun
    verifies what is there and writes the rest; an image that was replaced since is an error::

        lk.write_shards(lk.FolderStore("photos"), "shards", max_bytes=256_000_000, seed=0)

    Args:
        store: The images.
        root: Folder to fill; made if missing.
        max_count: Most samples in a shard.
        max_bytes: Largest size of a shard's file; only a single image that is larger exceeds it.
        seed: Shuffle the images once, so that classes mix. None keeps the order of `store.keys()`.
        classes, labels, keys: As for `ImageDataset`; the manifest has the classes.
        engine, num_workers, address, progress: As in `labkit.map_items`; one item is one shard.

    Returns:
        `root` as a Path.

    Raises:
        TypeError, ValueError: a limit is below 1; labels, keys or folders cannot be used (see `ImageDataset`); an image
            has a name or a size that `read_shards` would refuse; or `root` holds something else. Names the remedy.
        ItemErrors: some shards could not be written; the others are.
        OSError: the disk has no room for the shards; says how much is needed and free. None is written.

    Taught in: notebooks/08_shard_formats.ipynb
    """
    store, root = as_store(store), require_local_path("root", root)
    max_count, max_bytes = require_int("max_count", max_count), require_int("max_bytes", max_bytes)
    seed = None if seed is None else require_seed(seed)

    chosen, classes, labels = labeled(store, keys, classes, labels)
    keys = list(chosen)
    kind, texts = _label_texts(labels)
    sizes = sizes_of(store, keys)
    if sizes is None:
        shown = progress_bar(keys, show=progress, desc="sizes", unit="image")
        sizes = [len(read()) for _, read in zip(shown, reads_ahead(store, keys), strict=True)]
    members = member_names(keys)
    _check_members(keys, members, sizes)
    columns = zip(keys, members, sizes, texts, strict=True)
    samples = [Sample(*column, LABEL_SUFFIXES[kind]) for column in columns]
    if seed is not None:
        samples = [samples[position] for position in np.random.default_rng(seed % 2**64).permutation(len(samples))]
    digest = hashlib.sha256()
    for sample in samples:
        label = sample.label if kind == "classes" else f"{kind}\0{sample.label}"
        digest.update(f"{sample.member}\0{sample.n_bytes}\0{label}\0".encode(errors="surrogateescape"))
    settings = {
        "max_count": max_count,
        "max_bytes": max_bytes,
        "seed": seed,
        "names_and_sizes_sha256": digest.hexdigest(),
    }

    known_rows = _read_known_rows(root, settings, classes)
    times = change_times(store) if known_rows else {}
    remove_leftovers(root)  # of runs that were killed; a run that goes on keeps its own
    parts = _split_into_shards(samples, max_count, max_bytes)
    names = [f"shard-{number:06d}.tar" for number in range(len(parts))]
    items = [
        (name, part, known_rows.get(name), bool(changed_since(root / name, (each.store_key for each in part), times)))
        for name, part in zip(names, parts, strict=True)
    ]
    missing = [part for name, part, known, is_old in items if is_old or not (known and (root / name).is_file())]
    # A member has a header of one block, and its data end with a block: twice for a sample.
    require_room(root, sum(sample.n_bytes + 4 * tarfile.BLOCKSIZE for part in missing for sample in part))
    rows = map_items(
        partial(_make_shard, store, root),
        items,
        engine=engine,
        num_workers=num_workers,
        address=address,
        progress=progress,
        key=lambda item: item[0],
        description="shards",
        unit="shard",
    )

    if not (root / MANIFEST).exists():
        content = {"settings": settings, "classes": classes, "n_samples": len(samples), "shards": rows}
        content |= {"labels": kind} if kind != "classes" else {}
        write_record(root / MANIFEST, content, indent=1)
    shutil.rmtree(root / UNFINISHED, ignore_errors=True)
    return root


def read_manifest(text: bytes, name: str) -> dict:
    """A manifest's content: `settings`, `classes`, `labels` (what they are), `n_samples`, and `shards` with `name
    n_samples n_bytes sha256`.

    Raises:
        ValueError: it is not a manifest, or names a shard that is not a file in its folder; names it.
    """
    with suppress(ValueError, TypeError, AttributeError, RecursionError):
        content = json.loads(text)
        has_entries = content.keys() >= _MANIFEST_KEYS and isinstance(content["classes"], list)
        content.setdefault("labels", "classes")
        if has_entries and content["labels"] in LABEL_SUFFIXES and all(map(_is_row, content["shards"])):
            return content
    raise ArgumentError(f"{name} is not a manifest of shards: choose another folder, or write the shards again")


def _is_row(row: dict) -> bool:
    """Whether it has the entries of a shard, and names a file in its folder."""
    return row.keys() >= _ROW_KEYS and re.fullmatch(r"shard-\d{6,}\.tar", str(row["name"])) is not None


def _read_known_rows(root: Path, settings: dict, classes: list[str]) -> dict[str, dict]:
    """Rows of the shards that earlier runs wrote, by name. Raises ValueError if `root` holds another set."""
    manifest = root / MANIFEST
    if manifest.exists():
        content = read_manifest(manifest.read_bytes(), str(manifest))
        check_same_classes(str(root), content["classes"], classes, REMEDY)
        check_same_job(root, content["settings"], settings, what="shards")
        rows = content["shards"]
    else:
        try:
            claim_folder(root, f"{UNFINISHED}/settings.json", settings, what="shards")
        except (ArgumentError, FileNotFoundError):  # another process may just have finished the set
            if not manifest.exists():
                raise
            return _read_known_rows(root, settings, classes)
        found = map(read_record, (root / UNFINISHED).glob("shard-*.json"))
        rows = [row for row in found if row and _is_row(row)]  # none: another process has removed it
    return {row["name"]: row for row in rows}


def _label_texts(labels: np.ndarray) -> tuple[str, list[str]]:
    """What labels are, "classes" or "numbers", and the text of each."""
    is_class = labels.ndim == 1 and labels.dtype == np.int64
    return "classes" if is_class else "numbers", list(map(json.dumps, labels.tolist()))


def member_names(keys: Iterable[str]) -> list[str]:
    """Names of images in a shard, one for each key of a store; `store_key` gives the key back.

    WebDataset takes everything before the first dot of a file's name as the sample's key. So `dog/a.jpg` keeps its
    name. If the name has another dot or an upper-case suffix, or another file differs in the suffix alone, all dots of
    the name become `%2E`, and a suffix follows.
    """
    keys = list(keys)
    counts = Counter(key.rpartition(".")[0] for key in keys)
    names = []
    for key in keys:
        folder, slash, name = _escape(key).rpartition("/")
        stem, _, suffix = name.rpartition(".")
        is_repeated = counts[key.rpartition(".")[0]] > 1
        if is_repeated or not stem or "." in stem or suffix != suffix.lower():
            name = f"{name.replace('.', '%2E')}.{suffix.lower()}"
        names.append(folder + slash + name)
    return names


def _check_members(keys: list[str], members: list[str], sizes: Sequence[int]) -> None:
    """Refuse, before anything is written, what `read_shards` would refuse."""
    samples, limit = Counter(map(_sample_of, members)), max_file_bytes()
    no_suffix = [key for key, name in zip(keys, members, strict=True) if not name.endswith(IMAGE_SUFFIXES)]
    twice = [key for key, name in zip(keys, members, strict=True) if samples[_sample_of(name)] > 1]
    large = [key for key, size in zip(keys, sizes, strict=True) if size > limit]
    for wrong, what, remedy in (
        (no_suffix, "a name without a suffix of an image", f"give each one of {', '.join(IMAGE_SUFFIXES)}"),
        (twice, "the name of another", "let the store name each once"),
        (large, f"more than {limit} bytes", f"set {MAX_FILE_VARIABLE}, here and where they are read"),
    ):
        if wrong:
            has = "has" if len(wrong) == 1 else "have"
            raise ArgumentError(
                f"{n_images(len(wrong))} of {len(keys)} {has} {what}, such as {wrong[0]!r}, and read_shards would "
                f"refuse the shard: {remedy}, or leave these images out by keys="
            )


def _sample_of(member: str) -> str:
    """The key of a member's sample: what is left of its name's first dot."""
    folder, slash, name = member.rpartition("/")
    return folder + slash + name.partition(".")[0]


def _escape(key: str) -> str:
    escaped = re.sub(r"[%\x00-\x1f\x7f]", lambda found: f"%{ord(found[0]):02X}", key)
    # Whatever a store's keys are, no member leads out of the folder that a shard is extracted to, or to another's file.
    escaped = re.sub(r"^/|(?<=/)/|(?<![^/])\.\.(?![^/])", lambda found: {"/": "%2F"}.get(found[0], "%2E%2E"), escaped)
    return "%5F" + escaped[1:] if re.match(r"__[^/]*__/", escaped) else escaped  # else WebDataset skips it as metadata


def store_key(member: str) -> str:
    """The key, in its store, of an image in a shard."""
    stem = member.rpartition(".")[0]
    return unquote(stem if "%2E" in stem.rpartition("/")[2] else member, errors="surrogateescape")


def _split_into_shards(samples: list[Sample], max_count: int, max_bytes: int) -> list[list[Sample]]:
    """Consecutive parts, as full as the limits allow; an image larger than the limit has a shard of its own."""
    parts: list[list[Sample]] = []
    bytes_left = 0
    capacity = max_bytes // tarfile.RECORDSIZE * tarfile.RECORDSIZE - 2 * tarfile.BLOCKSIZE  # without the end mark
    for sample in samples:
        label_name, label = sample.label_file
        n_bytes = _bytes_in_tar(label_name, len(label)) + _bytes_in_tar(sample.member, sample.n_bytes)
        if not parts or len(parts[-1]) == max_count or n_bytes > bytes_left:
            parts.append([])
            bytes_left = capacity
        parts[-1].append(sample)
        bytes_left -= n_bytes
    return parts


def _bytes_in_tar(name: str, size: int) -> int:
    """Bytes that a member takes: its header, and its data with their padding."""
    header_bytes = tarfile.BLOCKSIZE
    if len(name) > _MAX_PLAIN_NAME or not name.isascii() or size >= 8**11:
        header_bytes = len(_header(name, size).tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))
    return header_bytes + -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def _header(name: str, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)  # owner 0, time 0, mode 644: the same in every run
    info.size = size
    return info


def _make_shard(store: Store, root: Path, item: tuple[str, list[Sample], dict | None, bool]) -> dict:
    """Write one shard, unless it is there as its known row says and no image is newer; returns its row of the manifest.

    One that is newer is compared by what it gives: the bytes of the shard are those of its images.
    """
    name, samples, known, is_stale = item
    path = root / name
    is_whole = known and path.is_file() and path.stat().st_size == known["n_bytes"]
    if known and is_whole and not is_stale and _sha256_of(path) == known["sha256"]:
        return known
    with atomic_path(path, dated=True) as partial_path:
        _write_tar(partial_path, samples, store)
        n_bytes, sha256 = partial_path.stat().st_size, _sha256_of(partial_path)
        row = {"name": name, "n_samples": len(samples), "n_bytes": n_bytes, "sha256": sha256}
        if known and row != known:
            raise ArgumentError(f"{path} was made of other images: {REMEDY}")
    try:
        write_record(root / UNFINISHED / f"{path.stem}.json", row)
    except FileNotFoundError:  # another process that writes the same set has finished it, and removed the folder
        if not (root / MANIFEST).exists():
            raise
    return row


def _write_tar(path: Path, samples: Sequence[Sample], store: Store) -> None:
    """Write images and labels in their order, and flush them to the disk.

    Raises:
        ValueError: an image has another size than was counted.
    """
    with open(path, "wb") as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8") as tar:
            reads = reads_ahead(store, [sample.store_key for sample in samples])
            for sample, read in zip(samples, reads, strict=True):
                data = read()
                if len(data) != sample.n_bytes:
                    raise ArgumentError(
                        f"{sample.store_key} has {len(data)} bytes where {sample.n_bytes} were counted: something "
                        "writes to the store; wait for it, then run again"
                    )
                for name, content in (sample.label_file, (sample.member, data)):
                    tar.addfile(_header(name, len(content)), io.BytesIO(content))
        file.flush()
        os.fsync(file.fileno())


def _sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
