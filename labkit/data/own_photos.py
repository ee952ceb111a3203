"""A reader's own photos in the place of those that labkit makes: linked, never copied, with numbers for names.

`LABKIT_PHOTOS` names a folder of JPEGs, at any depth. Each set of the course then links as many of them as it needs.
What cannot be decoded, or is neither RGB nor gray, is left out and listed in a file beside the links, which stays on
this machine.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path

from labkit.data.decode import decode, open_image
from labkit.data.headers import read_header
from labkit.data.image_formats import IMAGE_SUFFIXES, JPEG
from labkit.errors import ArgumentError, DecodeError, MissingFileError
from labkit.util.files import key_from_name, read_record, walk, write_atomic, write_record
from labkit.util.machine import OWN_PHOTOS_VARIABLE, own_photos, photo_root
from labkit.util.parallel import map_items

FEWEST = 64  # photos in a folder
LARGE_PX = 1000  # of the shorter side: fewer are no photo of the profile "camera"
LEFT_OUT = "left_out.txt"
_MANIFEST = "own_photos.json"
_N_GROUPS = 8  # folders of links: lessons about classes need some


def is_own(root: Path, profile: str) -> bool:
    """Whether this is the folder of a course's set, and the reader's photos go into it."""
    return own_photos() is not None and root == photo_root(profile)


def link_photos(root: Path, count: int, profile: str) -> int:
    """Link `count` photos of the reader's into `root`, or as many as there are.

    A rerun does nothing, unless a run was interrupted or a photo is gone from its place: then all are linked anew.

    Args:
        root: Folder to fill; made if missing.
        count: Number of photos.
        profile: For `"camera"`, those that are large enough alone.

    Returns:
        How many are there; 0 if too few are large enough for `"camera"`, and none is linked.

    Raises:
        FileNotFoundError: `LABKIT_PHOTOS` is not a folder.
        ValueError: it holds fewer than 64 JPEGs that can be decoded.
    """
    source = own_photos()
    if source is None or not source.is_dir():
        raise MissingFileError(f"{OWN_PHOTOS_VARIABLE}={source} is not a folder: name one with JPEGs, at any depth")
    record, links = read_record(root / _MANIFEST), list(root.glob("group_*/*.jpg"))
    if record and record["photos"] == len(links) and all(link.exists() for link in links):
        return len(links)
    if profile == "camera" and record is None and root.exists():  # with photos that labkit made for want of these
        return 0
    images = list(_images(source))
    jpegs = [path for path in images if path.name.lower().endswith(_SUFFIXES)]
    chosen, left_out = list[Path](), [f"{path.relative_to(source)}: no JPEG" for path in set(images) - set(jpegs)]
    candidates = iter(_in_mixed_order(jpegs, source))
    while len(chosen) < count and (some := list(islice(candidates, count - len(chosen) + 8))):
        for path, reason in zip(some, _reasons(some, profile), strict=True):
            if reason is None:
                chosen.append(path)
            elif reason:
                left_out.append(f"{path.relative_to(source)}: {reason}")
    chosen = chosen[:count]
    if profile == "camera" and len(chosen) < count:
        return 0
    if len(chosen) < min(count, FEWEST):
        raise ArgumentError(
            f"{source} holds {len(chosen)} JPEGs that can be decoded, at any depth, and {len(left_out)} other images: "
            f"the course takes {FEWEST} at least; leave {OWN_PHOTOS_VARIABLE} out for photos that labkit makes"
        )
    root.mkdir(parents=True, exist_ok=True)
    write_record(root / _MANIFEST, {"photos": -1, "left_out": len(left_out)})  # until all are there
    for link in links:
        link.unlink()
    for number, path in enumerate(chosen):
        link = root / f"group_{number % _N_GROUPS}" / f"{number:06d}.jpg"
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(path.resolve())
    if left_out:
        text = "".join(f"{line}\n" for line in sorted(left_out))
        write_atomic(root / LEFT_OUT, text.encode(errors="surrogateescape"))
    write_record(root / _MANIFEST, {"photos": len(chosen), "left_out": len(left_out)})
    return len(chosen)


def _images(folder: Path) -> Iterator[Path]:
    for each in walk(folder):
        if each.error:
            raise each.error
        yield from (folder / (each.prefix + name) for name in each.files if name.lower().endswith(_OF_IMAGES))


_SUFFIXES = (*JPEG.suffixes, *JPEG.other_suffixes)
_OF_IMAGES = (*_SUFFIXES, *IMAGE_SUFFIXES)


def _in_mixed_order(paths: Iterable[Path], source: Path) -> list[Path]:
    """Photos from all over the folder, the same at each call."""
    names = {path: key_from_name(str(path.relative_to(source))) for path in paths}
    return sorted(names, key=lambda path: hashlib.sha256(names[path].encode(errors="surrogateescape")).digest())


def _reasons(paths: list[Path], profile: str) -> list[str | None]:
    """Why each photo is left out; "" if it is too small for the profile, None if it is taken."""
    outcomes = map_items(lambda path: _reason(path, profile), paths, engine="threads", progress=False)
    return list(outcomes)


def _reason(path: Path, profile: str) -> str | None:
    header = read_header(str(path))
    if header.width and header.height and profile == "camera" and min(header.width, header.height) < LARGE_PX:
        return ""
    try:
        data = path.read_bytes()
        decode(data, key=path.name)
        mode = open_image(data).mode
    except (DecodeError, OSError) as error:
        return header.error or str(error)
    return None if mode in ("RGB", "L") else f"{mode}, and not RGB or gray"


def told_of(roots: Mapping[str, Path]) -> Iterator[str]:
    """Lines about what became of the reader's photos, for the terminal: they have names, and notebooks may be shared.

    Args:
        roots: Profile -> folder of its set, for which `link_photos` was called.
    """
    if own_photos() is None:
        return
    if not (roots["camera"] / _MANIFEST).is_file():
        yield (
            f"too few of your photos have {LARGE_PX} pixels in their shorter side: lessons on photos of a camera take "
            "photos that labkit makes"
        )
    paths = [root / LEFT_OUT for root in roots.values() if (root / LEFT_OUT).is_file()]
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths]  # a terminal may refuse odd bytes
    lines = sorted({line for text in texts for line in text.splitlines()})
    if lines:
        yield f"left out of your photos (not all may have been looked at): {len(lines)}"
        yield from (f"  {line}" for line in lines[:_MOST_TOLD])
    if len(lines) > _MOST_TOLD:
        yield f"  and more, in {', '.join(map(str, paths))}"


_MOST_TOLD = 20
