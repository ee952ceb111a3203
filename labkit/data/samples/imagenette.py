"""Imagenette by torchvision's own machinery, but whole or not at all.

torchvision takes the set for present as soon as its folder exists, so that a killed extraction leaves half a set that
counts as whole. Here everything happens in a hidden folder beside it, and the finished set is renamed into place.
"""

import os
import shutil
import urllib.request
from http.client import HTTPException
from pathlib import Path

from torchvision.datasets import Imagenette
from torchvision.datasets.utils import check_integrity

from labkit.core import redact, strip_credentials
from labkit.data.blobs import split_credentials
from labkit.data.extract import plan_members, unpack
from labkit.data.tar import TarStream

_TIMEOUT_S = 60.0  # without a byte


def download_imagenette(root: str | os.PathLike, *, size: str = "160px", url: str | None = None) -> Path:
    """Download Imagenette into `root`, laid out as `torchvision.datasets.Imagenette(root, size=size)` reads it.

    A rerun leaves a finished set alone, and fetches no archive again that is there whole.

    Args:
        root: Folder to put the set in; made if missing.
        size: `"full"`, `"320px"` or `"160px"`.
        url: A mirror's address of the same archive, `http(s)://`; its md5 is checked as well. A user and password in it
            go to that host alone.

    Returns:
        Folder of the set, such as `root/imagenette2-160`, with `train` and `val` in it.

    Raises:
        ValueError: unknown size.
        OSError: the download failed, or its md5 is wrong; names the address, without credentials, and the remedy.
        UnsafeTarError: the archive would write outside its folder (as `extract_tars` says it); nothing is extracted.
    """
    official, md5, name = _archive(size)
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
    """Not by torchvision's `download_url`: where https fails, that sends the address, signed query and all, by http."""
    if check_integrity(archive, md5):
        return
    archive.parent.mkdir(parents=True, exist_ok=True)
    try:
        _save(url, archive)
        if not check_integrity(archive, md5):
            raise OSError(f"its md5 is not {md5}")
    except (OSError, ValueError, HTTPException) as error:
        shutil.rmtree(archive.parent, ignore_errors=True)
        cause = redact(str(error))
        raise OSError(
            f"{strip_credentials(url)} could not be downloaded ({cause}): run again, or name a mirror by --url"
        ) from None


def _save(url: str, archive: Path) -> None:
    plain, headers = split_credentials(url)
    if not plain.startswith(("http://", "https://")):
        raise ValueError("unknown url type: http:// or https:// is wanted")
    request = urllib.request.Request(plain)  # noqa: S310 - checked above
    for name, value in headers.items():
        request.add_unredirected_header(name, value)
    # urllib honours the proxies of the environment, and without a timeout a server that stalls would hang the download.
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer, open(archive, "wb") as file:  # noqa: S310
        shutil.copyfileobj(answer, file, 1 << 20)


def _extract(archive: Path, tree: Path) -> None:
    """Checked as `extract_tars` checks: the md5 of a mirror's archive is right, but md5 is no proof of harmlessness."""
    with TarStream(archive) as members:
        plan = plan_members(str(archive), members)
    shutil.rmtree(tree, ignore_errors=True)  # half a set, where an extraction was killed
    unpack(archive, plan, tree, progress=False)
