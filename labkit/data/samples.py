"""Photos, and photos with real depth, without a download: made from the photographs that scikit-image carries.

Each photo is a pure function of (profile, seed, number): a window of a photograph, mirrored or not, with other colors
and film grain, so that its JPEG has the entropy of a camera's; decoding time depends on entropy. Depth comes from the
left picture of a stereo pair with a measured disparity for nearly every pixel (Middlebury 2014, "Motorcycle"), its
focal length and its baseline. A window, a zoom or a mirror image moves points in the picture and keeps their depth, so
every stored depth is a true one; where none was measured it is 0, as in Hypersim.
"""

import hashlib
import io
import os
import tarfile
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image, ImageEnhance

from labkit.data.own_photos import is_own, link_photos
from labkit.util.arguments import require_choice, require_int, require_local_path, require_seed
from labkit.util.files import (
    atomic_path,
    claim_folder,
    damage_named,
    require_room,
    write_atomic,
    write_record,
)
from labkit.util.machine import needing, note_photos
from labkit.util.parallel import check_engine, map_items
from labkit.util.pictures import WidthHeight, encode_image

Drawn = TypeVar("Drawn")

MANIFEST = "manifest.json"

# scikit-image's photographs: the function that loads each, and its license as scikit-image states it.
PHOTOGRAPHS = {
    "astronaut": "public domain (NASA)",
    "brick": "CC0 (CC0Textures)",
    "chelsea": "CC0 (Stefan van der Walt)",
    "coffee": "CC0 (Rachel Michetti)",
    "grass": "CC0 (linolafett)",
    "gravel": "CC0 (CC0Textures)",
    "hubble_deep_field": "public domain (NASA)",
    "retina": "CC0 (Mikael Haggstrom)",
    "rocket": "public domain (SpaceX)",
}


@dataclass(frozen=True)
class Profile:
    """How the files of a set look.

    sizes: size -> share. quality: JPEG quality -> share. subsampling: chroma subsampling -> share.
    grain: range of the standard deviation of the added film grain, in levels of 255. mean_bytes: of a file, about.
    """

    sizes: dict[WidthHeight, float]
    quality: dict[int, float]
    subsampling: dict[str, float]
    grain: tuple[float, float]
    mean_bytes: int


PROFILES = {
    # Most of ImageNet is about 500 x 375, quality 96, chroma not subsampled; some are small, some large. The
    # grain is set so that files have the sizes of ImageNet's: 138 GB in 1.28 million files, 110 KB on average.
    "imagenet": Profile(
        sizes={
            (500, 375): 0.46, (375, 500): 0.18, (500, 333): 0.16, (500, 500): 0.06, (300, 225): 0.10, (800, 600): 0.04,
        },
        quality={96: 0.7, 90: 0.2, 75: 0.1},
        subsampling={"4:4:4": 0.75, "4:2:0": 0.25},
        grain=(3.0, 6.5), mean_bytes=100_000,
    ),
    "camera": Profile(
        sizes={(2000, 1500): 0.7, (1500, 2000): 0.3},
        quality={92: 0.7, 85: 0.3},
        subsampling={"4:2:0": 0.7, "4:2:2": 0.3},
        grain=(3.0, 6.0), mean_bytes=800_000,
    ),
}  # fmt: skip


def make_photos(
    root: str | os.PathLike,
    count: int,
    *,
    profile: str = "imagenet",
    seed: int = 0,
    num_threads: int | None = None,
    engine: str = "threads",
    address: str | None = None,
    progress: bool = True,
) -> Path:
    """Make `count` JPEG photos under `root`, one folder per class, and a manifest with their checksums.

    A rerun makes only what is missing; a file that has its name is whole. The same (profile, seed) gives the same bytes
    for any `count`, engine and number of threads, with the same Pillow and NumPy. A folder that holds more photos of
    that set keeps them: they are the first `count`, and others.

    Args:
        root: Folder to fill; made if missing.
        count: Number of photos.
        profile: `"imagenet"` (about 500 x 375, the file sizes of ImageNet) or `"camera"` (2000 x 1500).
        seed: Each seed gives another set.
        num_threads: Default: the usable cores. With an engine other than threads, its workers.
        engine, address, progress: As in `map_items`. Threads suffice: Pillow and NumPy's generator release the GIL.

    Returns:
        `root` as a Path. Where `LABKIT_PHOTOS` names a folder, a set of the course, in `course.photo_root`, has links
        to photos of that folder.

    >>> root = lk.make_photos("photos", 8, progress=False)

    Raises:
        ValueError: unknown profile or engine, `count` below 1, or `root` holds something else; names the remedy.
        ItemErrors: some photos could not be written; names them. The others are there, and a rerun goes on.
        OSError: the disk has no room for them; says how much is needed and free. Nothing is written.

    Taught in: notebooks/00_measure.ipynb
    """
    with needing("lk.make_photos", "lab"):
        import skimage.data  # noqa: F401 - rather once here than in each worker
    root, seed = require_local_path("root", root), require_seed(seed)
    if is_own(root, profile):
        are_own = link_photos(root, require_int("count", count), profile) > 0
        note_photos(root, are_own=are_own)
        if are_own:
            return root
    settings = {"profile": require_choice("profile", profile, PROFILES), "seed": seed}
    count = require_int("count", count)
    check_engine(engine, num_threads, address)
    manifest = _claim_folder(root, settings)
    missing = [number for number in range(count) if not _is_done(root, manifest, photo_key(number))]
    if not missing:
        return root
    # Files of an interrupted run are not in the manifest yet, but whole.
    require_room(root, len(missing) * PROFILES[profile].mean_bytes)
    adopt = {number for number in missing if photo_key(number) not in manifest}
    make = partial(_make_one, root.absolute(), adopt, profile, seed)
    options: dict[str, Any] = {"engine": engine, "num_workers": num_threads, "address": address, "progress": progress}
    rows = map_items(make, missing, key=photo_key, description=f"{profile} photos", unit="photo", **options)
    manifest |= {row["key"]: row for row in rows}
    photos = [manifest[key] for key in sorted(manifest)]
    write_record(root / MANIFEST, {"settings": settings, "photos": photos}, indent=1)
    return root


def photo_key(number: int) -> str:
    """Path of photo `number` inside a set: `class/number.jpg`."""
    names = list(PHOTOGRAPHS)
    return f"{names[number % len(names)]}/{number:06d}.jpg"


def photo_bytes(number: int, *, profile: str = "imagenet", seed: int = 0) -> bytes:
    """Encoded JPEG of one photo; the same arguments give the same bytes."""
    rng = np.random.default_rng([seed % 2**64, number, sorted(PROFILES).index(profile)])
    look = PROFILES[profile]
    size = _draw(rng, look.sizes)
    photo = _load_photograph(photo_key(number).split("/")[0])
    photo = recolor(cut_window(photo, size, *choose_window(rng, photo, size), Image.Resampling.LANCZOS), rng)
    photo = _add_grain(photo, rng.uniform(*look.grain), rng)
    buffer = io.BytesIO()
    photo.save(buffer, "JPEG", quality=_draw(rng, look.quality), subsampling=_draw(rng, look.subsampling))
    return buffer.getvalue()


@cache
def _load_photograph(name: str) -> Image.Image:
    from skimage import data

    return Image.fromarray(getattr(data, name)()).convert("RGB")


def _draw(rng: np.random.Generator, shares: dict[Drawn, float]) -> Drawn:
    choices = list(shares)
    return choices[rng.choice(len(choices), p=list(shares.values()))]


def choose_window(rng: np.random.Generator, photo: Image.Image, size: WidthHeight) -> tuple[tuple, bool]:
    """A random window with the shape of `size` (left, top, right, bottom), and whether to mirror it."""
    scale = min(photo.width / size[0], photo.height / size[1]) * rng.uniform(0.7, 1.0)
    width, height = size[0] * scale, size[1] * scale
    left, top = rng.uniform(0, photo.width - width), rng.uniform(0, photo.height - height)
    return (left, top, left + width, top + height), rng.random() < 0.5


def cut_window(
    photo: Image.Image, size: WidthHeight, box: tuple, mirrored: bool, resample: Image.Resampling
) -> Image.Image:
    """A window of a picture, resized to `size`."""
    window = photo.resize(size, resample, box=box)
    return window.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else window


def recolor(photo: Image.Image, rng: np.random.Generator) -> Image.Image:
    """A photo with another brightness, contrast and saturation."""
    for enhance in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        photo = enhance(photo).enhance(rng.uniform(0.8, 1.2))
    return photo


def _add_grain(photo: Image.Image, sigma: float, rng: np.random.Generator) -> Image.Image:
    """Add film grain: the high frequencies that upscaling removed, and on which JPEG spends its bytes."""
    noise = rng.standard_normal((photo.height, photo.width, 1), dtype=np.float32) * np.float32(sigma)
    pixels = np.asarray(photo, np.float32) + noise
    return Image.fromarray(np.clip(pixels + 0.5, 0, 255).astype(np.uint8))


def _make_one(root: Path, adopt: set[int], profile: str, seed: int, number: int) -> dict:
    key = photo_key(number)
    if number in adopt and (root / key).is_file():
        data = (root / key).read_bytes()
    else:
        data = photo_bytes(number, profile=profile, seed=seed)
        write_atomic(root / key, data)
    return {"key": key, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _is_done(root: Path, manifest: dict[str, dict], key: str) -> bool:
    path, row = root / key, manifest.get(key)
    return row is not None and path.is_file() and path.stat().st_size == row["bytes"]


def _claim_folder(root: Path, settings: dict) -> dict[str, dict]:
    """Rows of the photos that an earlier run finished, by key."""
    content = claim_folder(root, MANIFEST, {"settings": settings, "photos": []}, what="photos", key="settings")
    with damage_named(root / MANIFEST):
        return {os.fspath(row["key"]): row for row in content["photos"] if row["bytes"]}


LIST_NAME = "filename_list_train.txt"
FOLDER_NAME = "train"
SETTINGS_NAME = "settings.json"
SIZE: WidthHeight = (1024, 768)  # Hypersim's

# Of scikit-image's pictures (a quarter of the benchmark's size), from its documentation.
_FOCAL_PX, _PRINCIPAL_POINTS_PX, _BASELINE_MM = 994.978, 31.086, 193.001
_VIEWS_PER_SCENE = 100  # as in Hypersim


def make_depth(
    root: str | os.PathLike,
    count: int,
    *,
    seed: int = 0,
    tar: bool = False,
    engine: str = "local",
    num_workers: int | None = None,
    address: str | None = None,
    progress: bool = True,
) -> Path:
    """Make `count` pairs of a photo and its depth in Marigold's Hypersim layout.

        root/train/ai_001_001/rgb_cam_00_fr0000.png           8-bit RGB, 1024 x 768
        root/train/ai_001_001/depth_plane_cam_00_fr0000.png   16-bit gray: millimetres, 0 where unknown
        root/filename_list_train.txt                          one line per pair, its names below `train`
        root/train.tar                                        with `tar=True`: as `cd train && tar -cf ../train.tar .`

    A rerun makes only what is missing; a file that has its name is whole. The same seed gives the same bytes for any
    `count` and number of workers, with the same Pillow, NumPy and scikit-image. A folder that holds more pairs of that
    seed keeps them, and the list names the first `count`.

    Args:
        root: Folder to fill; made if missing.
        count, seed: Number of pairs; each seed gives other windows.
        tar: Write the tar too: names sorted, no owners or times, so that its bytes are always the same.
        engine, num_workers, address, progress: As in `map_items`.

    Returns:
        `root` as a Path.

    Raises:
        ValueError: `count` below 1, or `root` holds something else, or another seed; names the remedy.
        ItemErrors: some pairs could not be made.

    Source: Scharstein et al., GCPR 2014 (see `skimage.data`). Taught in: notebooks/09_marigold_storage.ipynb
    """
    count, seed = require_int("count", count), require_seed(seed)
    root = require_local_path("root", root)
    with needing("course.make_depth", "lab"):
        import skimage.data  # noqa: F401 - rather once here than in each worker
    folder = root / FOLDER_NAME
    claim_folder(root, SETTINGS_NAME, {"depth pairs": "stereo_motorcycle", "seed": seed}, what="depth pairs")
    map_items(
        partial(_make_pair, folder, seed), range(count), engine=engine, num_workers=num_workers, address=address,
        is_done=lambda number: all((folder / name).is_file() for name in pair_names(number)), progress=progress,
        description="depth pairs", unit="pair", key=lambda number: pair_names(number)[0],
    )  # fmt: skip
    lines = "".join(" ".join(pair_names(number)) + "\n" for number in range(count)).encode()
    if not (root / LIST_NAME).is_file() or (root / LIST_NAME).read_bytes() != lines:
        write_atomic(root / LIST_NAME, lines)
    if tar:
        write_dot_tar(folder, folder.with_suffix(".tar"))
    return root


def pair_names(number: int) -> tuple[str, str]:
    """Names of the photo and of its depth, as in Hypersim: up to 100 views per scene, 999 scenes per volume."""
    scene, view_number = divmod(number, _VIEWS_PER_SCENE)
    volume, scene = divmod(scene, 999)
    folder, view = f"ai_{volume + 1:03d}_{scene + 1:03d}", f"cam_00_fr{view_number:04d}.png"
    return f"{folder}/rgb_{view}", f"{folder}/depth_plane_{view}"


def pair_bytes(number: int, *, seed: int = 0) -> tuple[bytes, bytes]:
    """Encoded PNGs of one pair, photo and depth; the same arguments give the same bytes."""
    rng = np.random.default_rng([seed % 2**64, number])
    photo, depth = _load_stereo_pair()
    window = choose_window(rng, photo, SIZE)
    rgb = recolor(cut_window(photo, SIZE, *window, Image.Resampling.LANCZOS), rng)
    # Nearest: at the edge of the foreground, a mean of two depths would be true of neither.
    millimetres = cut_window(depth, SIZE, *window, Image.Resampling.NEAREST)
    # Level 3 takes a third of the default's time, for files a few percent larger.
    return encode_image(rgb, "PNG", compress_level=3), encode_image(millimetres, "PNG", compress_level=3)


def write_dot_tar(folder: Path, path: Path) -> None:
    """Write the tar that `tar -cf path .` makes in `folder`, whole or not at all, unless it has all files already.

    Its members are `./` and what lies below, sorted, without owners and times: byte for byte what GNU tar writes with
    `--sort=name --owner=0 --group=0 --numeric-owner --mtime=@0 --mode=u=rwX,go=rX`.
    """
    files = {file for file in folder.rglob("*") if file.is_file() and not file.name.endswith(".partial")}
    if path.exists():
        with tarfile.open(path) as tar:
            if {folder / member.name for member in tar if member.isfile()} == files:
                return
    with atomic_path(path) as partial_path, tarfile.open(partial_path, "w", format=tarfile.GNU_FORMAT) as tar:
        tar.add(folder, arcname=".", filter=_anonymize)


def _anonymize(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Remove owners, times and odd modes from a member; None leaves out a file that is being written."""
    if member.name.endswith(".partial"):
        return None
    member.uid, member.gid, member.uname, member.gname, member.mtime = 0, 0, "", "", 0
    member.mode = 0o755 if member.isdir() else 0o644
    return member


@cache
def _load_stereo_pair() -> tuple[Image.Image, Image.Image]:
    """The left photo, RGB, and its depth in millimetres, 16-bit gray: 0 where the disparity is unknown (infinite)."""
    from skimage import data

    left, _, disparity = data.stereo_motorcycle()
    millimetres = _FOCAL_PX * _BASELINE_MM / (disparity + _PRINCIPAL_POINTS_PX)
    return Image.fromarray(left), Image.fromarray(np.rint(millimetres).astype(np.uint16))


def _make_pair(folder: Path, seed: int, number: int) -> None:
    for name, data in zip(pair_names(number), pair_bytes(number, seed=seed), strict=True):
        write_atomic(folder / name, data)
