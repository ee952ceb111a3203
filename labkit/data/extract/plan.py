"""What may come out of a tar, decided from its headers alone, before anything is written.

`tarfile`'s own filter asks the filesystem where a name would lead, and was led astray there (CVE-2025-4517 and its
kin). Here no member may lie behind a link and no link may lead through another, so that names alone decide.
"""

import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from labkit.core import MAX_MEMBERS, path_from_key


class UnsafeTarError(ValueError):
    """A member that would leave its folder, or is no file, folder or link. Nothing of the archive is extracted."""


@dataclass
class Plan:
    """What each member becomes; of several with one name the last counts, as with `tar -x`.

    places: number of the member in the archive -> paths that it fills, several where hard links share its data.
    sizes: number of the member -> bytes of its data; files only.
    """

    places: dict[int, list[str]] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)


def plan_members(archive: str, members: Iterable[tarfile.TarInfo]) -> Plan:
    """The plan for the members of `archive`.

    Raises:
        UnsafeTarError: names the archive, the member and what is wrong with it.
    """
    filled_by: dict[str, int] = {}
    plan, folders, links = Plan(), set(), {}
    for number, info in enumerate(members):
        try:
            if number == MAX_MEMBERS:
                raise ValueError(f"is one more than the {MAX_MEMBERS} that labkit extracts from one archive")
            path = safe_path(info.name)
            if info.islnk():
                filled_by[path] = _linked(filled_by, folders, safe_path(info.linkname))
                continue
            filled_by[path] = number
            if info.isdir():
                folders.add(number)
            elif info.issym():
                links[number] = info.linkname
            elif info.isreg() and path:
                plan.sizes[number] = info.size
            else:
                raise ValueError(_what(info))
        except ValueError as error:
            raise UnsafeTarError(_refusal(archive, info.name, error)) from error
    _check_tree(archive, filled_by, folders, links)
    for path, number in filled_by.items():
        plan.places.setdefault(number, []).append(path)
    return plan


def safe_path(name: str) -> str:
    """`name` without `.` and doubled slashes, "" for the archive's own folder. Raises ValueError if it would leave."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/"):
        raise ValueError("is an absolute name")
    if ".." in parts:
        raise ValueError("has `..` in its name")
    if "\0" in name:
        raise ValueError("has a zero byte in its name")
    return path_from_key("/".join(parts))


def colliding(plan: Plan) -> tuple[str, str] | None:
    """Two paths that differ in case alone, if there are any: one file where the filesystem ignores case."""
    seen: dict[str, str] = {}
    for path in (path for paths in plan.places.values() for path in paths):
        if (other := seen.setdefault(path.casefold(), path)) != path:
            return other, path
    return None


def _linked(filled_by: dict[str, int], folders: set[int], target: str) -> int:
    number = filled_by.get(target)
    if number is None or number in folders:
        raise ValueError(f"is a hard link to {target!r}, which is no file before it in the archive")
    return number


def _what(info: tarfile.TarInfo) -> str:
    if info.isdev():
        return "is a device or a pipe"
    return "has no name" if info.isreg() else f"is of unknown type {info.type!r}"


def _check_tree(archive: str, filled_by: dict[str, int], folders: set[int], links: dict[int, str]) -> None:
    """No path lies under a file or behind a link, and no link leads out."""
    parents = {parent for path in filled_by for parent in _parents(path)}
    link_paths = {path for path, number in filled_by.items() if number in links}
    for path, number in filled_by.items():
        try:
            if (path in parents or not path) and number not in folders:
                raise ValueError("is a folder to other members, and a link or a file itself")
            if number in links:
                _check_link(path, links[number], link_paths)
        except ValueError as error:
            raise UnsafeTarError(_refusal(archive, path or ".", error)) from error


def _parents(path: str) -> Iterator[str]:
    while (slash := path.rfind("/")) > 0:
        path = path[:slash]
        yield path


def _check_link(path: str, target: str, links: set[str]) -> None:
    """Follow `target` by names alone, as it stands at `path`."""
    at = path.split("/")[:-1]
    if not target or "\0" in target:
        raise ValueError("is a link without a name" if not target else "is a link with a zero byte in its name")
    if target.startswith("/"):
        raise ValueError(f"is a link to {target!r}, an absolute name")
    for part in target.split("/"):
        if "/".join(at) in links:
            raise ValueError(f"is a link to {target!r}, which leads through another link")
        if part == ".." and not at:
            raise ValueError(f"is a link to {target!r}, which leaves the folder")
        if part == "..":
            at.pop()
        elif part not in ("", "."):
            at.append(part)


def _refusal(archive: str, name: str, why: Exception) -> str:
    return f"{archive}: member {name!r} {why}. Nothing of the archive was extracted"
