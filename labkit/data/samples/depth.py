"""Photos with real depth, without a download: windows of the stereo pair that comes with scikit-image.

Its left picture has a measured disparity for nearly every pixel (Middlebury 2014, "Motorcycle"), and with the camera's
focal length and baseline that gives a depth. A window, a zoom or a mirror image moves points in the picture and keeps
their depth, so every stored depth is a true one; where none was measured it is 0, as in Hypersim.
"""

import os
import tarfile
from functools import cache, partial
from pathlib import Path

import numpy as np
from PIL import Image

from labkit.core import atomic_path, check_count, claim_folder, encode_image, require_int, write_atomic
from labkit.core.mapping import map_items
from labkit.data.samples.photos import choose_window, cut_window, recolour

LIST_NAME = "filename_list_train.txt"
FOLDER_NAME = "train"
SETTINGS_NAME = "settings.json"
SIZE = (1024, 768)  # width, height: Hypersim's

# Of scikit-image's pictures (a quarter of the benchmark's size), from its documentation.
_FOCAL_PX, _PRINCIPAL_POINTS_PX, _BASELINE_MM = 994.978, 31.086, 193.001
_FRAMES_PER_SCENE = 100  # as in Hypersim


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
    `count` and number of workers, with the same Pillow, NumPy and scikit-image.

    Args:
        root: Folder to fill; made if missing.
        count, seed: Number of pairs; each seed gives other windows.
        tar: Write the tar too: names sorted, no owners or times, so that its bytes are always the same.
        engine, num_workers, address, progress: As in `map_items`.

    Returns:
        `root` as a Path.

    Raises:
        ValueError: `count` below 1, or `root` holds something else, another seed, or more pairs; names the remedy.
        ItemErrors: some pairs could not be made.

    Source: Scharstein et al., GCPR 2014 (see `skimage.data`). Taught in: notebooks/09_marigold_storage.ipynb
    """
    require_int("count", count)
    root, folder = Path(root), Path(root, FOLDER_NAME)
    claim_folder(root, SETTINGS_NAME, {"depth pairs": "stereo_motorcycle", "seed": seed}, what="depth pairs")
    check_count(root, len(list(folder.glob("*/rgb_*.png"))), count, what="depth pairs")
    map_items(
        partial(_make_pair, folder, seed), range(count), engine=engine, num_workers=num_workers, address=address,
        is_done=lambda number: all((folder / name).is_file() for name in pair_names(number)), progress=progress,
        description="depth pairs", unit="pair", key=lambda number: pair_names(number)[0],
    )  # fmt: skip
    lines = (" ".join(pair_names(number)) + "\n" for number in range(count))
    write_atomic(root / LIST_NAME, "".join(lines).encode())
    if tar:
        write_dot_tar(folder, folder.with_suffix(".tar"))
    return root


def pair_names(number: int) -> tuple[str, str]:
    """Names of the photo and of its depth, as in Hypersim: up to 100 frames per scene, 999 scenes per volume."""
    scene, frame = divmod(number, _FRAMES_PER_SCENE)
    volume, scene = divmod(scene, 999)
    folder, view = f"ai_{volume + 1:03d}_{scene + 1:03d}", f"cam_00_fr{frame:04d}.png"
    return f"{folder}/rgb_{view}", f"{folder}/depth_plane_{view}"


def pair_bytes(number: int, *, seed: int = 0) -> tuple[bytes, bytes]:
    """Encoded PNGs of one pair, photo and depth; the same arguments give the same bytes."""
    rng = np.random.default_rng([seed, number])
    photo, depth = _load_stereo_pair()
    window = choose_window(rng, photo, SIZE)
    rgb = recolour(cut_window(photo, SIZE, *window, Image.Resampling.LANCZOS), rng)
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
