"""Imagenette by torchvision's own machinery, but whole or not at all.

torchvision takes the set for present as soon as its folder exists, so that a killed extraction leaves half a set that
counts as whole. Here everything happens in a hidden folder beside it, and the finished set is renamed into place.
"""

import os
import shutil
import socket
from http.client import HTTPException
from pathlib import Path

from torchvision.datasets import Imagenette
from torchvision.datasets.utils import download_url, extract_archive

_TIMEOUT_S = 60.0  # without a byte


def download_imagenette(root: str | os.PathLike, *, size: str = "160px", url: str | None = None) -> Path:
    """Download Imagenette into `root`, laid out as `torchvision.datasets.Imagenette(root, size=size)` reads it.

    A rerun leaves a finished set alone, and fetches no archive again that is there whole.

    Args:
        root: Folder to put the set in; made if missing.
        size: `"full"`, `"320px"` or `"160px"`.
        url: A mirror's address of the same archive; its md5 is checked as well.

    Returns:
        Folder of the set, such as `root/imagenette2-160`, with `train` and `val` in it.

    Raises:
        ValueError: unknown size.
        OSError: the download failed, or its md5 is wrong; names the address and the remedy.
    """
    official, md5, name = _archive(size)
    final, partial = Path(root) / name, Path(root) / f".{name}.partial"
    if final.is_dir():
        return final
    archive = partial / f"{name}.tgz"
    _fetch(url or official, archive, md5)
    shutil.rmtree(partial / name, ignore_errors=True)  # half a set, where an extraction was killed
    extract_archive(archive, partial)
    (partial / name).rename(final)
    shutil.rmtree(partial)
    return final


def count_images(root: str | os.PathLike, *, size: str = "160px") -> dict[str, int]:
    """Number of images in each split of a downloaded set, as `torchvision.datasets.Imagenette` finds them.

    Raises:
        OSError: the folder there is not a whole Imagenette; names the remedy.
    """
    try:
        return {split: len(Imagenette(root, split=split, size=size)) for split in ("train", "val")}
    except (OSError, KeyError) as error:
        folder = Path(root) / _archive(size)[2]
        raise OSError(f"{folder} is not a whole Imagenette ({error}): remove it and download again") from error


def _archive(size: str) -> tuple[str, str, str]:
    """Address, md5 and folder name, as torchvision has them."""
    if size not in Imagenette._ARCHIVES:
        raise ValueError(f"unknown size {size!r}: choose one of {', '.join(Imagenette._ARCHIVES)}")
    url, md5 = Imagenette._ARCHIVES[size]
    return url, md5, Path(url).stem


def _fetch(url: str, archive: Path, md5: str) -> None:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_TIMEOUT_S)  # torchvision sets none: a server that stalls would hang the download
    try:
        download_url(url, archive.parent, archive.name, md5)  # returns at once where the archive is there whole
    except (OSError, ValueError, RuntimeError, HTTPException) as error:
        # torchvision says "corrupted" without saying of what; a RecursionError is its word for too many redirects.
        cause = f"its md5 is not {md5}" if type(error) is RuntimeError else error
        shutil.rmtree(archive.parent, ignore_errors=True)
        raise OSError(f"{url} could not be downloaded ({cause}): run again, or name a mirror by --url") from error
    finally:
        socket.setdefaulttimeout(before)
