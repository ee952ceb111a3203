"""What each reader gives, leaves out or refuses: the table of the guide, cell by cell."""

import functools
import http.server
import io
import tarfile
import threading
import warnings
from pathlib import Path

import pytest
from PIL import Image

import labkit as lk
from tests.paths import REPO

LINES = (REPO / "notebooks/guide/reliability.md").read_text().partition("## What a reader leaves out")[2].splitlines()
ROWS = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in LINES if line.startswith("|")]
SITUATIONS = ROWS[0][1:]
TABLE = {
    (row[0], situation): outcome for row in ROWS[2:] for situation, outcome in zip(SITUATIONS, row[1:], strict=True)
}


def encoded(format: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (32, 24), (90, 120, 30)).save(file, format)
    return file.getvalue()


PHOTO = encoded("JPEG")
ITEMS = {  # what lies beside a sound photo, by the column of the table
    "hidden": {"__MACOSX/._a.jpg": PHOTO},
    ".gif": {"cat/b.gif": encoded("GIF")},
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


def tar_of(path: Path, situation: str, *, labels: bool = False) -> Path:
    folder = folder_of(path.with_suffix(".folder"), situation)
    for image in list(folder.glob("cat/*.jpg")) if labels else ():
        image.with_suffix(".cls").write_text("3")
    with tarfile.open(path, "w") as tar:
        for source in sorted(folder.rglob("*")):
            tar.add(source, source.relative_to(folder).as_posix(), recursive=False)
    data = path.read_bytes()
    if situation == "cut":
        path.write_bytes(data[:700])
    if situation == "bytes behind the end":
        path.write_bytes(data + b"more" * 256)
    return path


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *about):
        """Say nothing."""


def over_http(root: Path) -> list[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(root))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            return names_read(lk.HttpStore(f"http://127.0.0.1:{server.server_port}/"))
        finally:
            server.shutdown()
            thread.join()


def names_read(store) -> list[str]:
    return [key for key in list(store.keys()) if store.read(key)]


def sizes_found(root: Path) -> list[str]:
    frame = lk.collect_sizes(root, progress=False)
    return [f"{row.path}{' listed' if row.source == 'unreadable' else ''}" for row in frame.itertuples()]


def pixels_built(root: Path) -> list[str]:
    return list(lk.PixelStore.build(root, root.with_suffix(".pixels"), progress=False).keys)


def shards_written(root: Path) -> list[str]:
    lk.write_shards(lk.FolderStore(root), root.with_suffix(".shards"), progress=False)
    tars = sorted(root.with_suffix(".shards").glob("*.tar"))
    names = []
    for path in tars:
        with tarfile.open(path) as tar:
            names += [name for name in tar.getnames() if name.endswith(".jpg")]
    return names


def files_extracted(tar: Path) -> list[str]:
    [folder] = lk.extract_tars(tar, tar.with_suffix(".extracted"), progress=False)
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def read(reader: str, root: Path, situation: str) -> list[str]:
    """The names that a reader gives; a sample that has only pixels counts as one name."""
    match reader:
        case "TarStore":
            return names_read(lk.TarStore(tar_of(root.with_suffix(".tar"), situation)))
        case "read_shards":
            tar = tar_of(root.with_suffix(".tar"), situation, labels=True)
            return [f"{label}" for _, label in lk.read_shards(tar)]
        case "extract_tars":
            return files_extracted(tar_of(root.with_suffix(".tar"), situation))
    folder_of(root, situation)
    match reader:
        case "FolderStore":
            return names_read(lk.FolderStore(root))
        case "collect_sizes":
            return sizes_found(root)
        case "ImageDataset":
            dataset = lk.ImageDataset(lk.FolderStore(root))
            return [f"{index}" for index in range(len(dataset)) if dataset[index]]
        case "BatchLoader":
            return [f"{label}" for _, labels in lk.BatchLoader(root, batch_size=1, size=16) for label in labels]
        case "PixelStore.build":
            return pixels_built(root)
        case "write_shards":
            return shards_written(root)
        case "HttpStore":
            return over_http(root)
    raise AssertionError(f"no such reader: {reader}")


def outcome(reader: str, root: Path, situation: str) -> str:
    try:
        names = read(reader, root, situation)
    except lk.LabkitError as error:
        item = {"dead link": "b.jpg", "damaged": "b", ".gif": "gif"}.get(
            situation, "127.0.0.1" if "Http" in reader else root.name
        )
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
    shown = {row[0].partition(".")[0] for row in ROWS[2:]}
    as_another = {
        "ObjectStore",
        "PILDataset",
        "DepthPairs",
        "ReplayLoader",
    }  # HttpStore, ImageDataset, its store, its loader
    endings = ("Store", "Dataset", "Loader", "Pairs", "_shards", "_tars", "_sizes")
    assert {name for name in lk.__all__ if name.endswith(endings)} == shown | as_another
