"""Every data script, store and decoder in an unusual place: a C locale, and a home that is read-only.

`python -m tests.hardening.test_odd_places FOLDER` runs all of it in one process. Folders and photos have names that
ASCII cannot spell; their pixels and bytes must come back all the same.
"""

import os
import runpy
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import labkit as lk
from labkit import course
from labkit.app import cli
from labkit.util.files import path_from_key
from labkit.util.process import print_utf8
from tests.hardening.inputs import files_of
from tests.paths import REPO, SCRIPTS, invoke

C_LOCALE = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}
HOMES = ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "LABKIT_HOME", "MPLCONFIGDIR")
# Root writes anywhere unless its process gives up CAP_DAC_OVERRIDE, for itself and its children.
OBEYING_PERMISSIONS = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(24, 1, 0, 0, 0); os.execv(sys.argv[1], sys.argv[1:])"
)
NAMES = ("Größe 日本", "Öut", "gemächt")
PHOTOS = ("é.jpg", "日 本.jpg", "\udcff.jpg")


def run_there(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run this Python in such a place, in `folder`; its output is bytes."""
    home = folder / "home"
    home.mkdir(mode=0o555)
    place = {**C_LOCALE, **dict.fromkeys(HOMES, str(home)), "PYTHONPATH": str(REPO), "TQDM_DISABLE": "1"}
    command = [sys.executable, "-c", OBEYING_PERMISSIONS, sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=os.environ | place, capture_output=True, timeout=300, check=False)


def use_everything(folder: Path) -> None:
    """Run all in this process: a new one takes seconds to load torch."""
    from labkit.data.decode import missing_decoders  # not by the workers of extract_tars, which load this module

    assert sys.getfilesystemencoding() == "ascii"
    with pytest.raises(PermissionError):
        Path.home().joinpath("x").mkdir()
    photos, out, made = (folder / path_from_key(name) for name in NAMES)
    shards, pixels, extracted, sizes, depth, gnu, pax = (
        out / path_from_key(name)
        for name in ("schärds", "bücher.pixels", "extrahiért", "größen.csv", "tiéfe", "tär-gnu.tar", "tär-pax.tar")
    )
    for path in SCRIPTS.glob("*.py"):
        assert run_script(path.stem, "--help") == 0
    assert run_script("download", out, "--size", "é") == 2
    assert run_script("make_photos", made, 3) == 0
    (photos / path_from_key("ß")).mkdir(parents=True)
    for name, path in zip(PHOTOS, sorted(made.glob("*/*.jpg")), strict=True):
        (photos / path_from_key("ß") / path_from_key(name)).write_bytes(path.read_bytes())
    store = lk.FolderStore(photos)
    with course.serve_folder(photos) as url:
        assert files_of(lk.HttpStore(url)) == files_of(store)
    out.mkdir()
    for path, form in {gnu: tarfile.GNU_FORMAT, pax: tarfile.PAX_FORMAT}.items():
        with tarfile.open(path, "w", format=form) as tar:
            tar.add(photos, ".")
        assert files_of(lk.TarStore(path)) == files_of(store)
    assert run_script("extract_tars", extracted, gnu, pax) == 0
    for path in extracted.glob("t*"):
        assert files_of(lk.FolderStore(path)) == files_of(store)
    assert run_script("make_shards", photos, shards, "--engine", "threads") == 0
    loaded, read = lk.ImageDataset(store), lk.read_shards(shards, verify=True)
    assert sorted(int(image.sum()) for image, _ in loaded) == sorted(int(image.sum()) for image, _ in read)
    assert run_script("make_pixels", photos, pixels) == 0
    assert list(lk.PixelStore(pixels).keys) == store.keys()
    assert sum(len(labels) for _, labels in lk.BatchLoader(store, size=16, batch_size=2, num_threads=1)) == 3
    for decoder in set(lk.DECODERS) - set(missing_decoders()):
        assert all(len(lk.decode(data, decoder, key=key)) == 3 for key, data in files_of(store).items())
    assert run_script("collect_sizes", photos, sizes) == 0
    assert run_script("make_depth", depth, 1, "--tar", "--num-workers", 0) == 0


def run_script(name: str, *arguments: object) -> int:
    try:
        runpy.run_path(str(SCRIPTS / f"{name}.py"))["main"](list(map(str, arguments)))
    except SystemExit as end:
        return end.code
    return 0


@pytest.mark.exhaustive
def test_everything_works_there_and_names_on_the_disk_are_utf8(tmp_path):
    done = run_there(tmp_path, "-m", "tests.hardening.test_odd_places", str(tmp_path))
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    root = os.fsencode(tmp_path)  # looked at as bytes, which no locale changes
    assert sorted(os.listdir(root)) == sorted([*map(str.encode, NAMES), b"home"])
    photos = {name.encode("utf-8", "surrogateescape") for name in PHOTOS}
    for place in ("Größe 日本/ß", "Öut/extrahiért/tär-pax/ß", "Öut/extrahiért/tär-gnu/ß"):
        assert set(os.listdir(root + b"/" + place.encode())) == photos
    rows = (tmp_path / "Öut" / "größen.csv").read_bytes().splitlines()
    assert {row.split(b",")[0] for row in rows[1:]} == {"ß/".encode() + photo for photo in photos}
    assert "Öut/größen.csv: 3 images".encode() in done.stdout


def test_a_tour_without_a_home_names_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_HOME", "/proc/labkit")  # not even root makes a folder there
    monkeypatch.chdir(tmp_path)
    result = invoke(cli.main, ["tour", "--only", "00"])
    assert result.exit_code == 2
    assert result.stderr.startswith("labkit: /proc/labkit cannot be written to")
    assert "LABKIT_HOME" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


if __name__ == "__main__":
    print_utf8()
    use_everything(Path(sys.argv[1]))
