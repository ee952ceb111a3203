"""Foreign files against Pillow and tarfile: `python -m tests.hardening.corpora FOLDER`.

Every image and tar under the folder goes through the decoders, stores, sizes, loaders and readers. What Pillow or
tarfile reads otherwise is printed, a line for each file, and makes the exit status 1. The folder is only read.
"""

import os
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from torchvision.datasets.folder import IMG_EXTENSIONS

import labkit as lk
from labkit.data.extract import extract_tars
from tests.paths import contents

IMAGES, TARS = IMG_EXTENSIONS, (".tar",)
MAX_TAR_BYTES = 1 << 30
MEAN_ERROR = 2.0  # of 255, as the guide promises
PLAIN_MODES = {"RGB", "L", "1"}  # whose way to RGB is beyond doubt; of others the decoders are compared with each other


def files_under(root: Path, suffixes: tuple[str, ...]) -> list[Path]:
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(folder, name) for name in sorted(names) if name.lower().endswith(suffixes) and name[0] != "."]
    return [path for path in found if path.is_file()]


def by_pillow(path: Path) -> tuple[np.ndarray | None, bool]:
    """Pillow's upright RGB, None if it refuses the file; and whether another way to RGB would be as good."""
    try:
        with Image.open(path, formats=("JPEG", "PNG", "WEBP", "BMP", "PPM", "TIFF")) as image:
            image.load()
            is_plain = image.mode in PLAIN_MODES and "transparency" not in image.info
            return np.asarray(ImageOps.exif_transpose(image).convert("RGB")), is_plain
    except Exception:  # whatever a foreign file makes Pillow raise
        return None, True


def image_faults(path: Path, counts: Counter) -> Iterator[str]:
    """What decoders make of a file that Pillow does not."""
    data = path.read_bytes()
    expected, is_plain = by_pillow(path)
    found = {}
    for decoder in lk.DECODERS:
        try:
            found[decoder] = lk.decode(data, decoder).permute(1, 2, 0).numpy()
        except lk.DecodeError:
            found[decoder] = None
    refused = sorted(decoder for decoder, pixels in found.items() if pixels is None)
    if len(refused) == len(found):
        counts["refused by all decoders" + (", read by Pillow" if expected is not None else " and Pillow")] += 1
        return
    if refused:
        yield f"refused by {', '.join(refused)} alone"
    reference = expected if expected is not None and is_plain else found["pil"]
    for decoder, pixels in found.items():
        if pixels is None or reference is None:
            continue
        if pixels.shape != reference.shape:
            yield f"{decoder}: {pixels.shape[:2]}, not {reference.shape[:2]}"
        elif (error := np.abs(pixels.astype(int) - reference).mean()) > MEAN_ERROR:
            yield f"{decoder}: {error:.1f} of 255 from {'Pillow' if reference is expected else 'pil'}"
    counts["decoded"] += 1


def size_faults(root: Path, images: list[Path]) -> Iterator[str]:
    """Sizes and orientations that differ from Pillow's."""
    sizes = lk.collect_sizes(root, caches=False, ignore=(), progress=False).set_index("path")
    for path in images:
        key = path.relative_to(root).as_posix()
        if key not in sizes.index:
            yield f"{key}: collect_sizes has no row for it"
            continue
        pixels, _ = by_pillow(path)
        row = sizes.loc[key]
        if pixels is not None and row.source == "header":
            sides = (row.width, row.height) if row.exif_orientation < 5 else (row.height, row.width)
            if (pixels.shape[1], pixels.shape[0]) != sides:
                yield f"{key}: collect_sizes says {sides}, Pillow {pixels.shape[1::-1]}"


def loader_faults(root: Path, images: list[Path], counts: Counter) -> Iterator[str]:
    """Files that a store, an ImageDataset or a BatchLoader loses, or reads in other words."""
    others = (".avif", ".gif", ".heic", ".heif", ".jfif", ".jp2", ".jpe", ".jxl", ".pbm", ".pnm")
    store = lk.FolderStore(root, ignore=others)
    keys = list(store.keys())
    expected = sorted(path.relative_to(root).as_posix() for path in images)
    yield from (f"{key}: the folder and the store disagree on it" for key in sorted({*keys} ^ {*expected}))
    yield from (f"{key}: read otherwise" for key in keys if store.read(key) != (root / key).read_bytes())
    loader = lk.BatchLoader(store, batch_size=16, size=64, classes=[], on_error="skip")
    n_images = sum(len(batch) for batch, _ in loader)
    counts["skipped by BatchLoader"] = len(loader.skipped)
    if n_images + len(loader.skipped) != len(keys):
        yield f"BatchLoader gave {n_images} images and skipped {len(loader.skipped)} of {len(keys)}"
    for skipped in loader.skipped:
        try:
            lk.decode(store.read(skipped.key))
        except lk.DecodeError:
            continue
        yield f"{skipped.key}: decoded by lk.decode, skipped by BatchLoader"


def by_tarfile(path: Path) -> dict[str, bytes] | None:
    """The files of a tar, None if tarfile refuses it; ValueError if they are too large, as a sparse file may say."""
    try:
        with tarfile.open(path, "r:") as tar:
            if sum(info.size for info in tar) > MAX_TAR_BYTES:
                raise ValueError
            return {info.name.removeprefix("./"): tar.extractfile(info).read() for info in tar if info.isreg()}
    except (tarfile.TarError, OSError, EOFError):
        return None


def by_store(path: Path) -> dict[str, bytes]:
    store = lk.TarStore(path)
    return {name: store.read(name) for name in store.names()}


def by_extraction(path: Path) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        [root] = extract_tars(path, folder, progress=False)
        return contents(root)


def tar_faults(path: Path, counts: Counter) -> Iterator[str]:
    """Members that TarStore or extract_tars give otherwise than tarfile, or not at all without an error."""
    try:
        members = by_tarfile(path)
    except ValueError:
        counts["tars left out: too large"] += 1
        return
    counts["tars"] += 1
    for reader, read in {"TarStore": by_store, "extract_tars": by_extraction}.items():
        try:
            found = read(path)
        except (lk.LabkitError, OSError) as error:
            counts[f"tars refused by {reader}"] += 1
            if members:
                print(f"note: {path}: {str(error)[:200]}")
        else:
            if members is None:
                yield f"{reader} gives {len(found)} members, and tarfile an error"
            elif missing := sorted(name for name, data in members.items() if found.get(name) != data):
                yield f"{reader}: {len(missing)} of {len(members)} members differ, first {missing[0]}"


def check(root: Path) -> tuple[Counter, list[str]]:
    """What was tried under a folder, and every disagreement."""
    counts, faults = Counter(), []
    images = files_under(root, IMAGES)
    for path in images:
        faults += [f"{path.relative_to(root)}: {fault}" for fault in image_faults(path, counts)]
    counts["images"] = len(images)
    if images:
        faults += [*size_faults(root, images), *loader_faults(root, images, counts)]
    for path in files_under(root, TARS):
        faults += [f"{path.relative_to(root)}: {fault}" for fault in tar_faults(path, counts)]
    return counts, faults


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit("usage: python -m tests.hardening.corpora FOLDER")
    tried, found = check(Path(sys.argv[1]).absolute())
    print("\n".join([*found, "", *(f"{number:6} {what}" for what, number in sorted(tried.items()))]))
    sys.exit(1 if found else 0)
