"""Run every data script, store and decoder in an unusual place: a C locale, and a home that is read-only.

`python -m tests.hardening.odd_places FOLDER` runs the steps in this process, and prints the result of each as JSON.
Folders and photos have names that ASCII cannot spell; their pixels and bytes must come back all the same.
"""

import json
import os
import runpy
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import labkit as lk
from labkit import course
from labkit.data.decode import missing_decoders
from labkit.data.stores import Store
from labkit.util.files import path_from_key
from labkit.util.process import print_utf8
from tests.paths import REPO, SCRIPTS

C_LOCALE = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}
HOMES = ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "LABKIT_HOME", "MPLCONFIGDIR")
# Root writes anywhere unless its process gives up CAP_DAC_OVERRIDE, for itself and its children.
_OBEYING_PERMISSIONS = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(24, 1, 0, 0, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


def run_there(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run this Python in such a place, in `folder`; its output is bytes."""
    home = folder / "home"
    home.mkdir(mode=0o555)
    place = {**C_LOCALE, **dict.fromkeys(HOMES, str(home)), "PYTHONPATH": str(REPO), "TQDM_DISABLE": "1"}
    command = [sys.executable, "-c", _OBEYING_PERMISSIONS, sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=os.environ | place, capture_output=True, timeout=300, check=False)


def run_steps(folder: Path) -> Iterator[tuple[str, str]]:
    """Run all steps in this process; yields the name of each, and "ok" or its error."""
    photos, out, made = (folder / path_from_key(name) for name in ("Größe 日本", "Öut", "gemächt"))
    shards, pixels, extracted, sizes, depth, gnu, pax = (
        out / path_from_key(name)
        for name in ("schärds", "bücher.pixels", "extrahiért", "größen.csv", "tiéfe", "tär-gnu.tar", "tär-pax.tar")
    )
    steps = [
        ("make_photos", made, 3), (read_stores, made, photos, {gnu: tarfile.GNU_FORMAT, pax: tarfile.PAX_FORMAT}),
        ("make_shards", photos, shards, "--engine", "threads"), ("make_pixels", photos, pixels),
        (read_images, photos, pixels, shards), ("extract_tars", extracted, gnu, pax),
        (read_extracted, photos, extracted), ("collect_sizes", photos, sizes),
        ("make_depth", depth, 1, "--tar", "--num-workers", 0), (download, out), (show_help,),
    ]  # fmt: skip
    for step, *arguments in steps:
        name = getattr(step, "__name__", step)
        try:
            run_script(step, *arguments) if step is name else step(*arguments)
            yield name, "ok"
        except Exception as error:
            yield name, f"{type(error).__name__}: {error}"


def run_script(name: str, *arguments: object) -> None:
    """Run a script in this process: a new one takes seconds to load torch."""
    code = runpy.run_path(str(SCRIPTS / f"{name}.py"))["main"](list(map(str, arguments)), standalone_mode=False)
    if code:
        raise RuntimeError(f"{name} ended with {code}")


def download(out: Path) -> None:
    with pytest.raises(RuntimeError, match="download ended with"):
        run_script("download", out, "--size", "é")


def show_help() -> None:
    for path in SCRIPTS.glob("*.py"):
        run_script(path.stem, "--help")


def contents(store: Store) -> dict[str, bytes]:
    return {key: store.read(key) for key in list(store.keys())}


def read_stores(made: Path, photos: Path, tars: dict[Path, int]) -> None:
    """Read the same bytes from a folder, over HTTP and from tars, under names beyond ASCII and even UTF-8."""
    (photos / path_from_key("ß")).mkdir(parents=True)
    for name, path in zip(("é.jpg", "日 本.jpg", "\udcff.jpg"), sorted(made.glob("*/*.jpg")), strict=True):
        (photos / path_from_key("ß") / path_from_key(name)).write_bytes(path.read_bytes())
    expected = contents(lk.FolderStore(photos))
    for path, form in tars.items():
        path.parent.mkdir(exist_ok=True)
        with tarfile.open(path, "w", format=form) as tar:
            tar.add(photos, ".")
        assert contents(lk.TarStore(path)) == expected, path.name
    with course.serve_folder(photos) as url:
        assert contents(lk.HttpStore(url)) == expected


def read_extracted(photos: Path, extracted: Path) -> None:
    for folder in extracted.glob("t*"):
        assert contents(lk.FolderStore(folder)) == contents(lk.FolderStore(photos))


def read_images(photos: Path, pixels: Path, shards: Path) -> None:
    """Read the same images from shards, and the keys from a pixel store; decode with every decoder."""
    store = lk.FolderStore(photos)
    assert list(lk.PixelStore(pixels).keys) == store.keys()
    sums = [
        {tuple(image.shape): int(image.sum()) for image, _ in dataset}
        for dataset in (lk.ImageDataset(store), lk.read_shards(shards, verify=True))
    ]
    assert sums[0] == sums[1]
    assert sum(len(labels) for _, labels in lk.BatchLoader(store, size=16, batch_size=2, num_threads=1)) == 3
    for decoder in set(lk.DECODERS) - set(missing_decoders()):
        assert all(len(lk.decode(data, decoder, key=key)) == 3 for key, data in contents(store).items())


if __name__ == "__main__":
    print_utf8()
    for row in run_steps(Path(sys.argv[1])):
        print(json.dumps(row), flush=True)
