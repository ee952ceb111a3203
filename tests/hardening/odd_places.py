"""Run every data script, store and decoder with odd names, a C locale and a home that is read-only.

    python -m tests.hardening.odd_places            # in each place of `PLACES`; prints a table
    python -m tests.hardening.odd_places walk FOLDER    # in this process

Folders and photos have names that ASCII cannot spell; their pixels and bytes must come back all the same.
"""

import json
import os
import runpy
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from labkit.core.names import path_from_key
from labkit.core.stdio import print_utf8
from labkit.data import missing_decoders

SCRIPTS = Path(__file__).parents[2] / "data_scripts"
C_LOCALE = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}
HOMES = ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "LABKIT_HOME", "MPLCONFIGDIR")
# Root writes anywhere unless its process gives up CAP_DAC_OVERRIDE, for itself and its children.
_AS_OTHERS = "import ctypes, os, sys; ctypes.CDLL(None).prctl(24, 1, 0, 0, 0); os.execv(sys.argv[1], sys.argv[1:])"


def read_only(folder: Path) -> dict[str, str]:
    """Return variables that put every home into a read-only folder."""
    folder.mkdir()
    folder.chmod(0o555)
    return dict.fromkeys(HOMES, str(folder))


PLACES: dict[str, Callable[[Path], dict[str, str]]] = {
    "as it is": lambda folder: {},
    "C locale": lambda folder: C_LOCALE,
    "read-only home": lambda folder: read_only(folder / "home"),
    "both": lambda folder: {**C_LOCALE, **read_only(folder / "home")},
}


def run_in(place: str, folder: Path, *command: str) -> subprocess.CompletedProcess:
    """Run this Python with `command` in that place; its output is bytes."""
    variables = {**os.environ, **PLACES[place](folder), "PYTHONPATH": str(SCRIPTS.parent), "TQDM_DISABLE": "1"}
    whole = [sys.executable, "-c", _AS_OTHERS, sys.executable, *command]
    return subprocess.run(whole, cwd=folder, env=variables, capture_output=True, timeout=300, check=False)


def walk(folder: Path) -> Iterator[tuple[str, str]]:
    """Run all steps in this process; yields the name and "ok" or an error."""
    photos, out, made = (folder / path_from_key(name) for name in ("Größe 日本", "Öut", "gemächt"))
    steps: dict[str, Callable[[], None]] = {
        "make_photos": lambda: script("make_photos", made, 3),
        "stores": lambda: stores(made, photos, out),
        "make_shards": lambda: script("make_shards", photos, out / path_from_key("schärds"), "--engine", "threads"),
        "make_pixels": lambda: script("make_pixels", photos, out / path_from_key("bücher.pixels")),
        "readers": lambda: readers(photos, out),
        "extract_tars": lambda: script(
            "extract_tars", out / path_from_key("extrahiért"), *sorted(out.glob("*.tar")), "--verify"
        ),
        "extracted": lambda: same_files(photos, out / path_from_key("extrahiért") / path_from_key("tär-pax")),
        "collect_sizes": lambda: script(
            "collect_sizes", photos, out / path_from_key("größen.csv"), "--write-metadata-cache"
        ),
        "make_depth": lambda: script("make_depth", out / path_from_key("tiéfe"), 1, "--tar", "--num-workers", 0),
        "download": lambda: refused("download", out, "--url", "http://127.0.0.1:9/é"),
        "help": helped,
    }
    for name, step in steps.items():
        try:
            step()
            yield name, "ok"
        except Exception as error:
            yield name, f"{type(error).__name__}: {error}"


def script(name: str, *arguments: object) -> None:
    """Run a script in this process: a new one takes seconds to load torch."""
    code = runpy.run_path(str(SCRIPTS / f"{name}.py"))["app"](list(map(str, arguments)), standalone_mode=False)
    if code:
        raise RuntimeError(f"{name} ended with {code}")


def refused(name: str, *arguments: object) -> None:
    try:
        script(name, *arguments)
    except RuntimeError:
        return
    raise AssertionError(f"{name} was not refused")


def helped() -> None:
    for path in sorted(SCRIPTS.glob("*.py")):
        script(path.stem, "--help")


def stores(made: Path, photos: Path, out: Path) -> None:
    """Read the same bytes from a folder, over HTTP and from tars, under names beyond ASCII and even UTF-8."""
    import labkit as lk

    for name, path in zip(("é.jpg", "日 本.jpg", "\udcff.jpg"), sorted(made.glob("*/*.jpg")), strict=True):
        copy = photos / path_from_key("ß") / path_from_key(name)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    folder = lk.FolderStore(photos)
    out.mkdir()
    for kind in ("gnu", "pax"):
        with tarfile.open(
            out / path_from_key(f"tär-{kind}.tar"), "w", format=getattr(tarfile, f"{kind.upper()}_FORMAT")
        ) as tar:
            tar.add(photos, ".")
    with lk.serve_folder(photos) as url:
        others = {"http": lk.HttpStore(url)}
        for path in sorted(out.glob("*.tar")):
            others |= {f"{path.name} {mode}": lk.TarStore(path, mode=mode) for mode in ("index", "tarfile", "reopen")}
        for name, store in others.items():
            assert list(store.keys()) == folder.keys(), f"{name}: {list(store.keys())} and {folder.keys()}"
            assert all(store.read(key) == folder.read(key) for key in folder.keys()), name  # noqa: SIM118


def readers(photos: Path, out: Path) -> None:
    import labkit as lk

    folder = lk.FolderStore(photos)
    dataset, pixels = lk.ImageDataset(folder), lk.PixelStore(out / path_from_key("bücher.pixels"))
    assert list(pixels.keys) == folder.keys()
    shards = {
        tuple(image.shape): int(image.sum()) for image, _ in lk.read_shards(out / path_from_key("schärds"), verify=True)
    }
    assert shards == {tuple(image.shape): int(image.sum()) for image, _ in dataset}
    assert sum(len(labels) for _, labels in lk.BatchLoader(folder, size=16, batch_size=2, num_threads=1)) == 3
    for decoder in lk.DECODERS:
        if decoder not in missing_decoders():
            assert all(len(lk.decode(folder.read(key), decoder, key=key)) == 3 for key in folder.keys())  # noqa: SIM118


def same_files(one: Path, other: Path) -> None:
    files = [{path.relative_to(root): path.read_bytes() for path in root.rglob("*.jpg")} for root in (one, other)]
    assert files[0] == files[1]
    assert len(files[0]) == 3


def main() -> int:
    """Print a table of all places; returns the number of failures."""
    failed = 0
    for place in PLACES:
        with tempfile.TemporaryDirectory() as folder:
            done = run_in(place, Path(folder), "-m", "tests.hardening.odd_places", "walk", folder)
        for line in done.stdout.decode().splitlines():
            if line.startswith("["):
                step, result = json.loads(line)
                failed += result != "ok"
                print(f"{place:<16} {step:<14} {result}")
        failed += bool(done.returncode)
        if done.stderr:
            print(f"{place:<16} stderr         {done.stderr.decode(errors='replace').strip()}")
    return failed


if __name__ == "__main__":
    if sys.argv[1:2] == ["walk"]:
        print_utf8()
        for row in walk(Path(sys.argv[2])):
            print(json.dumps(row), flush=True)
    else:
        sys.exit(main())
