"""Imagenette in torchvision's layout, but whole or not at all.

torchvision looks only for the set's folder, so it takes the half set of a killed extraction for whole. Here everything
happens in a hidden folder beside it, and the finished set is renamed into place. A rerun keeps an archive whose md5 is
right, and extracts it again.
"""

import os
import shutil
import urllib.request
from http.client import HTTPException
from pathlib import Path

from torchvision.datasets import Imagenette
from torchvision.datasets.utils import check_integrity

from labkit.core import redact, require_choice, strip_credentials
from labkit.data.blobs import split_credentials
from labkit.data.extract import plan_members, unpack
from labkit.data.tar import TarStream

_TIMEOUT_S = 60.0  # without any data


def download_imagenette(root: str | os.PathLike, *, size: str = "160px", url: str | None = None) -> Path:
    """Download Imagenette into `root`, laid out as `torchvision.datasets.Imagenette(root, size=size)` reads it.

    A rerun leaves a finished set alone, and does not download a whole archive again.

    Args:
        root: Folder to put the set in; made if missing.
        size: `"full"`, `"320px"` or `"160px"`.
        url: A mirror's URL of the same archive, `http(s)://`; its md5 is checked, too. A user and password in it are
            sent to that host alone.

    Returns:
        Folder of the set, such as `root/imagenette2-160`, with `train` and `val` in it.

    Raises:
        ValueError: unknown size.
        OSError: the download failed, or its md5 is wrong; names the URL, without credentials, and the remedy.
        UnsafeTarError: the archive would write outside its folder, as for `extract_tars`; nothing is extracted.
    """
    official, md5, name = _find_archive(size)
    final, partial = Path(root) / name, Path(root) / f".{name}.partial"
    if final.is_dir():
        return final
    archive = partial / f"{name}.tgz"
    _fetch(url or official, archive, md5)
    _extract(archive, partial / "tree")
    (partial / "tree" / name).rename(final)
    shutil.rmtree(partial)
    return final


def count_images(root: str | os.PathLike, *, size: str = "160px") -> dict[str, int]:
    """Number of images in each split of a downloaded set, as `torchvision.datasets.Imagenette` finds them.

    Raises:
        OSError: the folder is not a whole Imagenette; names the remedy.
    """
    try:
        return {split: len(Imagenette(root, split=split, size=size)) for split in ("train", "val")}
    except (OSError, KeyError) as error:
        folder = Path(root) / _find_archive(size)[2]
        raise OSError(f"{folder} is not a whole Imagenette ({error}): remove it and download again") from error


def _find_archive(size: str) -> tuple[str, str, str]:
    """URL, md5 and folder name, as torchvision has them."""
    url, md5 = Imagenette._ARCHIVES[require_choice("size", size, Imagenette._ARCHIVES)]
    return url, md5, Path(url).stem


def _fetch(url: str, archive: Path, md5: str) -> None:
    """Not by torchvision's `download_url`: if https fails, that sends the URL, signed query and all, by http."""
    if check_integrity(archive, md5):
        return
    archive.parent.mkdir(parents=True, exist_ok=True)
    try:
        _download(url, archive)
        if not check_integrity(archive, md5):
            raise OSError(f"its md5 is not {md5}")
    except (OSError, ValueError, HTTPException) as error:
        shutil.rmtree(archive.parent, ignore_errors=True)
        cause = redact(str(error))
        raise OSError(
            f"{strip_credentials(url)} could not be downloaded ({cause}): run again, or name a mirror with --url"
        ) from None


def _download(url: str, archive: Path) -> None:
    plain, headers = split_credentials(url)
    if not plain.startswith(("http://", "https://")):
        raise ValueError("not an HTTP URL: it must begin with http:// or https://")
    request = urllib.request.Request(plain)  # noqa: S310 - checked above
    for name, value in headers.items():
        request.add_unredirected_header(name, value)
    # urllib uses the environment's proxies. Without a timeout, a server that stalls would hang the download.
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response, open(archive, "wb") as file:  # noqa: S310
        shutil.copyfileobj(response, file, 1 << 20)


def _extract(archive: Path, tree: Path) -> None:
    """Extract with the checks of `extract_tars`: a matching md5 does not prove that an archive is harmless."""
    with TarStream(archive) as members:
        plan = plan_members(str(archive), members)
    shutil.rmtree(tree, ignore_errors=True)  # of an extraction that was killed
    unpack(archive, plan, tree, progress=False)
