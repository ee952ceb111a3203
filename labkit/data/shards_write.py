"""Write shards in WebDataset's format.

Image and label of a sample, as WebDataset groups its members.

One shard: a tar in WebDataset's layout, whose bytes depend on its contents alone, and which is read to its end.

Decide which image goes into which shard, before the first byte is written.

Write the images of a store as WebDataset shards.
"""

import hashlib
import io
import json
import os
import re
import shutil
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np
from webdataset.tariterators import base_plus_ext

from labkit.data.labels import check_same_classes, labels_of
from labkit.data.stores import HasSizes, Store
from labkit.data.tar_members import TarError
from labkit.data.tar_stream import TarStream
from labkit.util.arguments import MAX_FILE_VARIABLE, MAX_PATH_BYTES, max_file_bytes, require_int
from labkit.util.files import (
    IMAGE_SUFFIXES,
    atomic_path,
    check_same_job,
    claim_folder,
    is_image,
    read_record,
    remove_leftovers,
    write_record,
)
from labkit.util.parallel import map_items
from labkit.util.process import progress_bar


def find_image(sample: dict[str, Any]) -> tuple[str, bytes]:
    """Name and data of a sample's image. Raises ValueError if there is none, more than one, or no label."""
    suffixes = [suffix for suffix in sample if f".{suffix}" in IMAGE_SUFFIXES]
    name = f"{sample['__key__']}.{suffixes[0] if suffixes else '*'} in {sample['__url__']}"
    if len(suffixes) != 1 or "cls" not in sample:
        found = ", ".join(part for part in sample if not part.startswith("__"))
        raise ValueError(f"{name}: a sample must have one image and a .cls with its label; it has {found}")
    return name, sample[suffixes[0]]


def parse_label(data: bytes, name: str) -> int:
    """The label in a `.cls` member. Raises ValueError, which names the sample, if it is no 64-bit integer."""
    with suppress(ValueError):
        label = int(data)
        if -(1 << 63) <= label < 1 << 63:  # a tensor of labels is int64
            return label
    raise ValueError(f"{name}: its label must be a 64-bit integer, got {data[:20]!r}")


_MAX_PLAIN_NAME = 100  # longer names, and those that are not ASCII, take a pax record of their own


class Sample(NamedTuple):
    """One image of a store on its way into a shard: its key there, its name here, its size and its label."""

    store_key: str
    member: str
    n_bytes: int
    label: int

    @property
    def label_file(self) -> tuple[str, bytes]:
        """Name and data of the member beside the image."""
        return self.member.rpartition(".")[0] + ".cls", str(self.label).encode()


def member_names(keys: Iterable[str]) -> list[str]:
    """Names of images in a shard, one for each key of a store; `store_key` gives the key back.

    WebDataset takes everything before the first dot of a file's name as the sample's key. So `dog/a.jpg` keeps its
    name. If the name has another dot or an upper-case suffix, or another file differs in the suffix alone, all dots of
    the name become `%2E`, and a suffix follows.
    """
    keys = list(keys)
    stems = [key.rpartition(".")[0] for key in keys]
    counts = Counter(stems)
    return [_member_name(key, counts[stem] > 1) for key, stem in zip(keys, stems, strict=True)]


def store_key(member: str) -> str:
    """The key, in its store, of an image in a shard."""
    stem = member.rpartition(".")[0]
    return unquote(stem if "%2E" in stem.rpartition("/")[2] else member, errors="surrogateescape")


def _member_name(key: str, is_stem_repeated: bool) -> str:
    folder, slash, name = _escape(key).rpartition("/")
    stem, _, suffix = name.rpartition(".")
    if is_stem_repeated or not stem or "." in stem or suffix != suffix.lower():
        name = f"{name.replace('.', '%2E')}.{suffix.lower()}"
    return folder + slash + name


def _escape(key: str) -> str:
    escaped = re.sub(r"[%\x00-\x1f\x7f]", lambda found: f"%{ord(found[0]):02X}", key)
    # Whatever a store's keys are, no member leads out of the folder that a shard is extracted to.
    escaped = re.sub(r"^/|(?<![^/])\.\.(?![^/])", lambda found: {"/": "%2F"}.get(found[0], "%2E%2E"), escaped)
    return "%5F" + escaped[1:] if re.match(r"__[^/]*__/", escaped) else escaped  # else WebDataset skips it as metadata


def sample_bytes(sample: Sample) -> int:
    """Bytes that a sample takes in a tar: image and label, each with its header and padding."""
    label_name, label = sample.label_file
    members = ((label_name, len(label)), (sample.member, sample.n_bytes))
    return sum(_header_bytes(name, size) + -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE for name, size in members)


def _header_bytes(name: str, size: int) -> int:
    if len(name) <= _MAX_PLAIN_NAME and name.isascii() and size < 8**11:
        return tarfile.BLOCKSIZE
    return len(_header(name, size).tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))


def _header(name: str, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)  # owner 0, time 0, mode 644: the same in every run
    info.size = size
    return info


def write_tar(path: Path, samples: Iterable[Sample], store: Store) -> None:
    """Write images and labels of `samples`, in their order, and flush them to the disk.

    Raises:
        ValueError: an image has another size than planned.
    """
    with open(path, "wb") as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8") as tar:
            for sample in samples:
                data = store.read(sample.store_key)
                if len(data) != sample.n_bytes:
                    raise ValueError(
                        f"{sample.store_key} has {len(data)} bytes where {sample.n_bytes} were counted: something "
                        "writes to the store; wait for it, then run again"
                    )
                for name, content in (sample.label_file, (sample.member, data)):
                    tar.addfile(_header(name, len(content)), io.BytesIO(content))
        file.flush()
        os.fsync(file.fileno())


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_members(stream: io.BufferedReader, name: str) -> Iterator[tuple[str, bytes]]:
    """(name, data) of every file of a sample (`sample_files`) in a tar, in one pass without seeking.

    Args:
        stream: The tar from its first byte on, plain or compressed. Unpacked in bounded memory.
        name: What messages call the tar.

    Raises:
        TarError: the tar is cut or damaged, between two members, too; names it and its last whole member. Or a member
            is larger than `labkit.util.arguments.max_file_bytes()`; its data are not read. Or as `sample_files` raises.
        ValueError: as `sample_files` raises.
    """
    limit = max_file_bytes()
    with TarStream(stream, name, needs_end_mark=True) as tar:
        for info in sample_files(tar):
            if info.size > limit:
                about = f"{info.size} bytes, over the limit of {limit} ({MAX_FILE_VARIABLE})"
                raise TarError(f"{name}: {info.name!r} has {about}")
            yield info.name, b"".join(tar.blocks(info))


def sample_files(tar: TarStream) -> Iterator[tarfile.TarInfo]:
    """The files that make up samples, by WebDataset's rule: what is left of the first dot in a name is the key.

    Folders, hidden files (`._a.jpg`) and names without a dot (`README`) belong to no sample, and are left out.

    Raises:
        TarError: a member that belongs to a sample is a link, a device or of an unknown type, so that the sample would
            lack it.
        ValueError: a member's name is one that WebDataset skips in silence.
    """
    for info in tar:
        if not info.isdir() and _belongs_to_sample(info.name, tar.name):
            if not info.isreg():
                raise TarError(
                    f"{tar.name}: {info.name!r} is {_describe(info)}, not a file, and its sample would lack it: write "
                    "the shard again with files alone (GNU tar: --dereference --hard-dereference)"
                )
            yield info


def _belongs_to_sample(member: str, name: str) -> bool:
    if len(member) > MAX_PATH_BYTES:
        about = f"{len(member)} characters, where a file's path has at most {MAX_PATH_BYTES} bytes"
        raise ValueError(f"{name}: {member[:200] + '...'!r} has {about}")
    if member.rpartition("/")[2].startswith("."):  # to WebDataset, `d/._a.jpg` is a sample named `d/`
        return False
    key, suffix = base_plus_ext(member)
    if key is not None and suffix.startswith("__"):
        raise ValueError(f"{name}: {member!r} has a suffix that WebDataset reserves: write it under another")
    if key is None and is_image(member):
        raise ValueError(f"{name}: {member!r} names no sample to WebDataset: write it without the line break")
    return key is not None


def _describe(info: tarfile.TarInfo) -> str:
    if info.islnk() or info.issym():
        return f"a {'hard' if info.islnk() else 'symbolic'} link to {info.linkname!r}"
    return "a device or a pipe" if info.isdev() else f"of unknown type {info.type!r}"


class Plan(NamedTuple):
    """The samples of each shard by its file name. `digest` is the SHA-256 of names, sizes and labels."""

    shards: dict[str, list[Sample]]
    classes: list[str]
    digest: str


def make_plan(
    store: Store, max_count: int, max_bytes: int, seed: int | None, classes: Sequence[str] | None, progress: bool
) -> Plan:
    """The plan for a store, from its keys and sizes."""
    samples, classes = _list_samples(store, classes, progress)
    if seed is not None:
        samples = [samples[position] for position in np.random.default_rng(seed).permutation(len(samples))]
    parts = _split_into_shards(samples, max_count, max_bytes)
    shards = {f"shard-{number:06d}.tar": part for number, part in enumerate(parts)}
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(f"{sample.member}\0{sample.n_bytes}\0{sample.label}\0".encode(errors="surrogateescape"))
    return Plan(shards, classes, digest.hexdigest())


def _list_samples(store: Store, classes: Sequence[str] | None, progress: bool) -> tuple[list[Sample], list[str]]:
    keys = list(store.keys())
    classes, labels = labels_of(keys, classes, source=store)
    if isinstance(store, HasSizes):
        sizes = store.sizes().tolist()
    else:
        sizes = [len(store.read(key)) for key in progress_bar(keys, show=progress, desc="sizes", unit="image")]
    columns = zip(keys, member_names(keys), sizes, labels.tolist(), strict=True)
    return [Sample(*column) for column in columns], classes


def _split_into_shards(samples: list[Sample], max_count: int, max_bytes: int) -> list[list[Sample]]:
    """Consecutive parts, as full as the limits allow; an image larger than the limit has a shard of its own."""
    parts: list[list[Sample]] = []
    bytes_left = 0
    capacity = max_bytes // tarfile.RECORDSIZE * tarfile.RECORDSIZE - 2 * tarfile.BLOCKSIZE  # without the end mark
    for sample in samples:
        if not parts or len(parts[-1]) == max_count or sample_bytes(sample) > bytes_left:
            parts.append([])
            bytes_left = capacity
        parts[-1].append(sample)
        bytes_left -= sample_bytes(sample)
    return parts


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
    `labkit.data.shards_write.member_names`). `manifest.json`, written last, has the class names, and count, bytes and
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
