"""What each reader gives, leaves out or refuses: the table of the guide, cell by cell."""

import tarfile
import warnings
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

import labkit as lk
from labkit.data.extract import extract_tars
from tests.image_files import encoded
from tests.paths import REPO
from tests.serving import QuietFolder, serving

LINES = (REPO / "notebooks/guide/reference.md").read_text().partition("## What a reader leaves out")[2].splitlines()
ROWS = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in LINES if line.startswith("|")]
SITUATIONS = ROWS[0][1:]
TABLE = {
    (reader, situation): outcome
    for readers, *outcomes in ROWS[2:]
    for reader in readers.split("`, `")
    for situation, outcome in zip(SITUATIONS, outcomes, strict=True)
}

PICTURE = Image.new("RGB", (32, 24), (90, 120, 30))
PHOTO = encoded(PICTURE)
ITEMS = {  # what lies beside a sound photo, by the column of the table
    "hidden": {"__MACOSX/._a.jpg": PHOTO},
    ".gif": {"cat/b.gif": encoded(PICTURE, "GIF")},
    ".txt": {"cat/notes.txt": b"not an image"},
    "damaged": {"cat/b.jpg": PHOTO[: len(PHOTO) // 2]},
}


def folder_of(root: Path, situation: str) -> Path:
    files = {} if situation == "no image" else {"cat/a.jpg": PHOTO}
    (root / "cat").mkdir(parents=True)
    for name, data in {**files, **ITEMS.get(situation, {})}.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(data)
    if situation == "dead link":
        (root / "cat/b.jpg").symlink_to("gone.jpg")
    return root


def tar_of(folder: Path, situation: str) -> Path:
    path = folder.with_suffix(".tar")
    with tarfile.open(path, "w") as tar:
        for source in sorted(folder.rglob("*")):
            tar.add(source, source.relative_to(folder).as_posix(), recursive=False)
    data = path.read_bytes()
    if situation == "cut":
        path.write_bytes(data[:700])
    if situation == "bytes behind the end":
        path.write_bytes(data + b"more" * 256)
    return path


def names_read(store) -> list[str]:
    return [key for key in list(store.keys()) if store.read(key)]


def over_http(root: Path) -> list[str]:
    with serving(partial(QuietFolder, directory=root)) as port:
        return names_read(lk.HttpStore(f"http://127.0.0.1:{port}/"))


def sizes_found(root: Path) -> list[str]:
    frame = lk.collect_sizes(root, progress=False)
    return [f"{row.path}{' listed' if row.source == 'unreadable' else ''}" for row in frame.itertuples()]


def pixels_built(root: Path) -> list[str]:
    return list(lk.PixelStore.build(root, root.with_suffix(".pixels"), progress=False).keys)


def shards_written(root: Path) -> list[str]:
    shards = lk.write_shards(lk.FolderStore(root), root.with_suffix(".shards"), progress=False)
    return [sample["__key__"] for sample in lk.read_shards(shards).samples()]


def labels_read(items) -> list[str]:
    """Of what gives no names."""
    return [f"label {label}" for _, label in items]


def files_extracted(tar: Path) -> list[str]:
    [folder] = extract_tars(tar, tar.with_suffix(".extracted"), progress=False)
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def labels_of_shard(root: Path, situation: str) -> list[str]:
    for image in list(root.glob("cat/*.jpg")):
        image.with_suffix(".cls").write_text("3")
    return labels_read(lk.read_shards(tar_of(root, situation)))


READERS = {  # what each gives of a folder, or of the tar of that folder
    "FolderStore": lambda root, situation: names_read(lk.FolderStore(root)),
    "TarStore": lambda root, situation: names_read(lk.TarStore(tar_of(root, situation))),
    "HttpStore": lambda root, situation: over_http(root),
    "ImageDataset": lambda root, situation: labels_read(lk.ImageDataset(lk.FolderStore(root))),
    "BatchLoader": lambda root, situation: labels_read(lk.BatchLoader(root, batch_size=1, size=16)),
    "PixelStore.build": lambda root, situation: pixels_built(root),
    "write_shards": lambda root, situation: shards_written(root),
    "read_shards": labels_of_shard,
    "extract_tars": lambda root, situation: files_extracted(tar_of(root, situation)),
    "collect_sizes": lambda root, situation: sizes_found(root),
}


def outcome(reader: str, root: Path, situation: str) -> str:
    folder_of(root, situation)
    try:
        names = READERS[reader](root, situation)
    except lk.LabkitError as error:
        place = "127.0.0.1" if reader == "HttpStore" else root.name
        item = {"dead link": "b.jpg", "damaged": "b", ".gif": "gif"}.get(situation, place)
        return "error" if item in str(error) else f"an error that does not name it: {error}"
    if any(name.endswith(" listed") for name in names):
        return "listed"
    return "left out" if len(names) == 1 else "taken"


@pytest.mark.parametrize(("reader", "situation"), TABLE, ids=[" - ".join(cell) for cell in TABLE])
def test_a_cell_of_the_guide_is_what_happens(reader, situation, tmp_path):
    if TABLE[reader, situation] == "-":
        pytest.skip("there is no such thing for this reader")
    with warnings.catch_warnings(action="error"):
        assert outcome(reader, tmp_path / "set", situation) == TABLE[reader, situation]


def test_the_table_has_every_reader():
    assert {reader for reader, _ in TABLE} == set(READERS)
    endings = ("Store", "Dataset", "Loader", "Pairs", "_shards", "_tars", "_sizes")
    # Of an HttpStore, an ImageDataset, its store, and its loader.
    like_another = {"ObjectStore", "PILDataset", "DepthPairs", "ReplayLoader"}
    shown = {reader.partition(".")[0] for reader in READERS} - {"extract_tars"}  # of data_scripts/extract_tars.py
    assert {name for name in lk.__all__ if name.endswith(endings)} == shown | like_another
