"""Tars of all kinds of members, for tests."""

import io
import re
import tarfile
from collections.abc import Iterable
from pathlib import Path

Member = tuple[tarfile.TarInfo, bytes]


def member(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "", **fields) -> Member:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size, info.mtime = kind, link, len(data), 1_700_000_000
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def add(tar: tarfile.TarFile, *about, **fields) -> None:
    info, data = member(*about, **fields)
    tar.addfile(info, io.BytesIO(data))


def make_tar(path: Path, members: Iterable[Member] | dict[str, bytes], mode: str = "w", **options) -> Path:
    """A tar of `members`, or of files by name."""
    with tarfile.open(path, mode, **options) as tar:
        for info, data in members if not isinstance(members, dict) else (member(*file) for file in members.items()):
            tar.addfile(info, io.BytesIO(data))
    return path


_KINDS = {">": tarfile.SYMTYPE, "=": tarfile.LNKTYPE, ":": tarfile.REGTYPE}


def listed(text: str) -> list[Member]:
    """`a:data` is a file, `a/` a folder, `a>b` a symbolic link, `a=b` a hard link, and `a|3` a member of type `3`."""
    members = []
    for word in text.split():
        name, sign, rest = re.fullmatch(r"([^:>=|]*)([:>=|]?)(.*)", word).groups()
        kind = rest.encode() if sign == "|" else tarfile.DIRTYPE if word.endswith("/") else _KINDS[sign or ":"]
        members.append(member(name, rest.encode() * (sign == ":"), kind, rest * (sign in _KINDS)))
    return members


def numbered_files(count: int, prefix: str = "photo", size: int = 700) -> list[Member]:
    """`photo0.jpg` of 700 bytes, `photo1.jpg` of 701, ...: each takes three blocks of a tar."""
    return [member(f"{prefix}{n}.jpg", bytes([n % 256]) * (size + n), mtime=1_600_000_000 + n) for n in range(count)]
