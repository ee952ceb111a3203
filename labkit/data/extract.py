"""Extract tar files safely, and resume.

Decide what may come out of a tar, from its headers alone, before anything is written.

`tarfile`'s own filter asks the filesystem where a name would lead, and was led astray there (CVE-2025-4517 and
others). Here no member may lie behind a link and no link may lead through another, so that names alone decide.

A folder that is filled by names and never left, even if another process puts links in its way.

The members of a tar as files: written one by one, each whole or not at all, and compared with the archive.

Extract tars, each into a folder of its own that appears whole, whatever is killed on the way.
"""

import errno
import filecmp
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from itertools import filterfalse, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from labkit.data.tar_members import TAR_SUFFIXES
from labkit.data.tar_stream import TarStream
from labkit.util.arguments import MAX_MEMBERS, MAX_PATH_BYTES
from labkit.util.files import file_lock, holds_record, path_from_key, sibling_path, write_record
from labkit.util.parallel import ItemErrors, check_engine, map_items
from labkit.util.process import progress_bar

_MAX_PART_BYTES = 255  # NAME_MAX of Linux


class UnsafeTarError(ValueError):
    """A member that would leave its folder, or is not a file, folder or link. Nothing of the archive is extracted."""


@dataclass
class Plan:
    """What each member becomes. Of several with one name the last counts, as with `tar -x`.

    Args:
        places: Number of a member in the archive -> paths that it fills; several if hard links share its data.
        sizes: Number of a member -> bytes of its data; files only.
    """

    places: dict[int, list[str]] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)


def plan_members(archive: str, members: Iterable[tarfile.TarInfo]) -> Plan:
    """The plan for the members of `archive`.

    Raises:
        UnsafeTarError: a member has an absolute name or `..` in it, a name of more than 4096 bytes or a part of it of
            more than 255, lies behind a link, is a device or a pipe, or is a link that leads out of the folder or
            through another link; names the archive, the member and the fault.
    """
    tree = _NamedTree()
    for number, info in enumerate(members):
        with _refusal_error(archive, info.name):
            tree.add(number, info)
    _check_paths(archive, tree)
    plan = Plan(sizes=tree.sizes)
    for path, number in tree.numbers.items():
        plan.places.setdefault(number, []).append(path)
    return plan


def safe_path(name: str) -> str:
    """`name` without `.` and doubled slashes, "" for the archive's own folder.

    Raises:
        ValueError: it would leave the folder, or no file can have it.
    """
    _check_length(name)
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if (longest := max(map(_n_bytes, parts), default=0)) > _MAX_PART_BYTES:
        raise ValueError(f"has {longest} bytes in a part of its name, where a file has at most {_MAX_PART_BYTES}")
    if name.startswith("/"):
        raise ValueError("is an absolute name")
    if ".." in parts:
        raise ValueError("has `..` in its name")
    if "\0" in name:
        raise ValueError("has a zero byte in its name")
    return path_from_key("/".join(parts))


def _check_length(path: str) -> None:
    """Refuse what is longer than a path can be: memory and time for it would grow with the square of its depth."""
    if (n_bytes := _n_bytes(path)) > MAX_PATH_BYTES:
        raise ValueError(f"has a path of {n_bytes} bytes, where a file has at most {MAX_PATH_BYTES}")


def _n_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogateescape"))


def find_case_collision(plan: Plan) -> tuple[str, str] | None:
    """Two paths that differ in case alone, if there are any: one file where the filesystem ignores case."""
    seen: dict[str, str] = {}
    for path in (path for paths in plan.places.values() for path in paths):
        if (other := seen.setdefault(path.casefold(), path)) != path:
            return other, path
    return None


@dataclass
class _NamedTree:
    """What members make of each path, as far as read.

    numbers: Path -> number of the member whose data it has.
    folders, links, sizes: By number; a link has its target, a file its size.
    """

    numbers: dict[str, int] = field(default_factory=dict)
    folders: set[int] = field(default_factory=set)
    links: dict[int, str] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)

    def add(self, number: int, info: tarfile.TarInfo) -> None:
        if number == MAX_MEMBERS:
            raise ValueError(f"is one more than the {MAX_MEMBERS} that labkit extracts from one archive")
        path = safe_path(info.name)
        if info.islnk():
            number = self._find_file(safe_path(info.linkname))
        elif info.isdir():
            self.folders.add(number)
        elif info.issym():
            self.links[number] = info.linkname
        elif info.isdev():
            raise ValueError("is a device or a pipe")
        elif not info.isreg():
            raise ValueError(f"is of unknown type {info.type!r}")
        elif not path:
            raise ValueError("has no name")
        else:
            self.sizes[number] = info.size
        self.numbers[path] = number

    def _find_file(self, target: str) -> int:
        number = self.numbers.get(target)
        if number is None or number in self.folders:
            raise ValueError(f"is a hard link to {target!r}, which is not a file before it in the archive")
        return number


@contextmanager
def _refusal_error(archive: str, name: str) -> Iterator[None]:
    """Turn a ValueError, which says what is wrong with a member, into an UnsafeTarError that names both."""
    try:
        yield
    except ValueError as error:
        shown = name if len(name) <= MAX_PATH_BYTES else name[:200] + "..."
        text = f"{archive}: member {shown!r} {error}. Nothing of the archive was extracted"
        raise UnsafeTarError(text) from error


def _check_paths(archive: str, tree: _NamedTree) -> None:
    """No path may lie under a file or behind a link, and no link may lead out."""
    parents = _find_parents(tree.numbers)
    targets = {path: tree.links[number] for path, number in tree.numbers.items() if number in tree.links}
    for path, number in tree.numbers.items():
        with _refusal_error(archive, path or "."):
            if number not in tree.folders and (not path or path in parents):
                raise ValueError("is a folder to other members, and a link or a file itself")
            if path in targets:
                _check_link(path, targets)


def _find_parents(paths: Iterable[str]) -> set[str]:
    """Those of the paths under which others lie: sorted with the slash as the first letter, one follows at once.

    A set of all folders that lie above a path would take memory with the square of its depth.
    """
    ordered = sorted(paths, key=lambda path: path.replace("/", "\0"))
    return {path for path, following in pairwise(ordered) if following.startswith(path + "/")}


def _check_link(path: str, targets: dict[str, str]) -> None:
    """Follow the link at `path` by names alone: it must stay inside, and must not lead through another link."""
    target = targets[path]
    _check_length(target)
    if not target:
        raise ValueError("is a link without a name")
    if "\0" in target:
        raise ValueError("is a link with a zero byte in its name")
    if target.startswith("/"):
        raise ValueError(f"is a link to {target!r}, an absolute name")
    folder = path.split("/")[:-1]
    for part in target.split("/"):
        if "/".join(folder) in targets:
            raise ValueError(f"is a link to {target!r}, which leads through another link")
        if part == "..":
            if not folder:
                raise ValueError(f"is a link to {target!r}, which leaves the folder")
            folder.pop()
        elif part not in ("", "."):
            folder.append(part)


_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Tree(AbstractContextManager):
    """The folder at `root`, made if missing. A context manager.

    Names are `/`-separated, and checked before. Each step down starts from an open folder and follows no link: where a
    folder was exchanged for a link, there is an OSError, and nothing is written behind the link.
    """

    def __init__(self, root: Path):
        root.mkdir(exist_ok=True)
        self.root = root
        self._top = os.open(root, _OPEN_FOLDER)
        self._folder, self._descriptor = "", os.dup(self._top)

    def __exit__(self, *exception: object) -> None:
        os.close(self._descriptor)
        os.close(self._top)

    def has(self, path: str) -> bool:
        """Whether something lies there, a link to nothing included."""
        folder, name = self._enter_parent(path)
        return os.access(name, os.F_OK, dir_fd=folder, follow_symlinks=False)

    def put(self, file: Path, path: str) -> None:
        """Rename `file`, from beside the root, to its place."""
        folder, name = self._enter_parent(path)
        os.rename(file, name, dst_dir_fd=folder)

    def link_to(self, path: str, file: Path) -> None:
        """Make `file` another name of what lies at `path`; a copy, where the filesystem has no hard links."""
        folder, name = self._enter_parent(path)
        try:
            os.link(name, file, src_dir_fd=folder, follow_symlinks=False)
        except OSError:
            shutil.copy2(self.root / path, file, follow_symlinks=False)

    def set_time(self, path: str, time_ns: int) -> None:
        folder, name = self._enter_parent(path)
        os.utime(name, ns=(time_ns, time_ns), dir_fd=folder, follow_symlinks=False)

    def _enter_parent(self, path: str) -> tuple[int, str]:
        """The folder that `path` lies in, open until the next call, and the last part of `path`."""
        folder, _, name = path.rpartition("/")
        return self.enter(folder), name or "."

    def enter(self, folder: str) -> int:
        """Make the folder if it is missing, and open it until the next call."""
        if folder != self._folder:
            descriptor = os.dup(self._top)
            for part in filter(None, folder.split("/")):
                descriptor = _open_subfolder(descriptor, part, self.root / folder)
            os.close(self._descriptor)
            self._folder, self._descriptor = folder, descriptor
        return self._descriptor


def _open_subfolder(parent: int, name: str, path: Path) -> int:
    """Open the folder `name`, made if missing, and close its parent."""
    try:
        with suppress(FileExistsError):
            os.mkdir(name, dir_fd=parent)
        return os.open(name, _OPEN_FOLDER, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            text = f"{path}: {name!r} is a link or a file where a folder was: another process writes here"
            raise OSError(text) from error
        raise
    finally:
        os.close(parent)


def unpack(archive: Path, plan: Plan, tree: Path, progress: bool) -> None:
    """Fill the folder `tree`; what it has already is whole and stays. The file being written is `half`, beside it."""
    tree.mkdir(exist_ok=True)
    if (pair := find_case_collision(plan)) and _ignores_case(tree):
        raise ValueError(f"{archive}: members {pair[0]!r} and {pair[1]!r} are one file here: choose another filesystem")
    half = tree.with_name("half")
    half.unlink(missing_ok=True)  # it may be a hard link to a whole file, which writing would spoil
    folders: dict[str, tarfile.TarInfo] = {}
    options = {"total": sum(plan.sizes.values()), "unit": "B", "unit_scale": True, "desc": archive.name}
    with TarStream(archive) as stream, progress_bar(show=progress, **options) as bar, Tree(tree) as inside:
        for info, paths in _planned_members(stream, plan):
            if info.isdir():
                folders[paths[0]] = info
                inside.enter(paths[0])
            else:
                _write_member(stream, info, paths, half, inside)
            bar.update(info.size)
        for path, info in folders.items():  # last: a new file would change the time of its folder
            inside.set_time(path, _mtime_ns(info))


def find_differences(archive: Path, plan: Plan, tree: Path) -> list[str]:
    """How the members under `tree` differ from those of the archive; more files may lie there."""
    with TarStream(archive) as stream:
        return [
            f"{path or '.'!r} {difference}"
            for info, paths in _planned_members(stream, plan)
            for path in paths
            if (difference := _find_difference(stream, info, tree / path, tree / paths[0]))
        ]


def _planned_members(stream: TarStream, plan: Plan) -> Iterator[tuple[tarfile.TarInfo, list[str]]]:
    """Members that fill paths, with these paths."""
    for number, info in enumerate(stream):
        if number in plan.places:
            yield info, plan.places[number]


def _write_member(stream: TarStream, info: tarfile.TarInfo, paths: list[str], half: Path, tree: Tree) -> None:
    """Fill the first path from the archive, the others by hard links to it."""
    for path in paths:
        if tree.has(path):
            continue
        if info.issym():
            os.symlink(path_from_key(info.linkname), half)
            _set_time(half, info)
        elif path == paths[0]:
            _write_file(stream, info, half)
        else:
            tree.link_to(paths[0], half)
        tree.put(half, path)


def _write_file(stream: TarStream, info: tarfile.TarInfo, half: Path) -> None:
    mode = info.mode & (0o755 if info.mode & 0o100 else 0o644) | 0o600  # as tarfile's data filter
    with open(half, "xb", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, mode)) as file:  # less umask
        for block in stream.blocks(info):
            file.write(block)
    _set_time(half, info)


def _set_time(path: Path, info: tarfile.TarInfo) -> None:
    time_ns = _mtime_ns(info)
    os.utime(path, ns=(time_ns, time_ns), follow_symlinks=False)


def _mtime_ns(info: tarfile.TarInfo) -> int:
    """When the member was written; 0 if it says nothing that a file's time can be."""
    try:  # not tarfile's float, which cannot hold nanoseconds
        time_ns = Decimal(info.pax_headers.get("mtime", info.mtime)) * 10**9
        return int(time_ns) if abs(time_ns) < 1 << 63 else 0
    except (ArithmeticError, ValueError):
        return 0


def _ignores_case(tree: Path) -> bool:
    return tree.with_name(tree.name.upper()).exists()


def _find_difference(stream: TarStream, info: tarfile.TarInfo, path: Path, first: Path) -> str:
    """How the file at `path` differs from the member; `first` is the path that has the member's own data."""
    if not os.path.lexists(path):
        return "is missing"
    if info.isdir():
        return "" if path.is_dir() else "is not a folder"
    if info.issym():
        return "" if _is_link_to(path, path_from_key(info.linkname)) else "is not the same link"
    if path.is_symlink() or not path.is_file():
        return "is not a file"
    if (size := path.stat().st_size) != info.size:
        return f"has {size} bytes, not {info.size}"
    return "" if _has_data_of(stream, info, path, first) else "has other contents"


def _is_link_to(path: Path, target: str) -> bool:
    return path.is_symlink() and os.readlink(path) == target


def _has_data_of(stream: TarStream, info: tarfile.TarInfo, path: Path, first: Path) -> bool:
    if path != first:
        return filecmp.cmp(first, path, shallow=False)
    with open(path, "rb") as file:
        return all(file.read(len(block)) == block for block in stream.blocks(info))


WORK = ".extract"  # folder under the root: what each folder came from, and what is still being extracted
_BLOCK_BYTES = 4096  # of the filesystem, to estimate the space that a file takes


def extract_tars(
    archives: str | os.PathLike | Iterable[str | os.PathLike],
    root: str | os.PathLike,
    *,
    engine: str = "local",
    num_workers: int | None = None,
    address: str | None = None,
    verify: bool = False,
    progress: bool = True,
) -> list[Path]:
    """Extract each archive into a folder of its own: `n01440764.tar` into `root/n01440764`, as ImageNet is laid out.

    A folder appears under its name when all of it is there. A rerun after a kill goes on with whole members, kept in
    the hidden folder `root/.extract`, and skips what is done. Modification times are kept; owners, set-user-id bits,
    others' write permission and what the umask takes away are not. Of several members with one name the last counts.

    Args:
        archives: One tar or several, plain or compressed (gzip, bzip2, xz; zstd from Python 3.14 on).
        root: Folder for their folders; made if missing.
        engine, num_workers, address: As in `map_items`; an item is an archive.
        verify: Compare what was extracted, by earlier runs too, with the archive, byte for byte. What was just written
            may come from memory: a later run also proves the disk.
        progress: Show a live bar: of archives; of bytes, if there is only one.

    Returns:
        The folders, in the order of the archives.

    Raises:
        FileNotFoundError: no such archive.
        ValueError: an archive's name gives no folder, or two give the same.
        OSError: too little space; names both numbers of bytes. Nothing is extracted.
        ItemErrors: some archives failed; names them, the others are extracted. An archive is refused whole if it is
            unsafe (`plan_members`), exceeds a limit, is cut, damaged or goes on after its end,
            differs from the folder that is there, or has names that differ in case alone where case is ignored.

    Taught in: notebooks/09_marigold_storage.ipynb
    """
    check_engine(engine, num_workers, address)
    root = Path(root).absolute()
    jobs = _make_jobs(archives, root)
    run = partial(_map_jobs, engine=engine, num_workers=num_workers, address=address, unit="archive")
    pending = jobs if verify else list(filterfalse(_is_extracted, jobs))
    missing_bytes, failures = run(_missing_bytes, pending, progress=progress, description="check")
    _check_space(root, sum(missing_bytes.values()))
    show_archives = progress and len(missing_bytes) > 1  # one archive runs in this process, and has its own bar
    extract = partial(_extract, verify, progress and not show_archives and engine != "ray")
    failures |= run(extract, list(missing_bytes), progress=show_archives, description="extract")[1]
    if failures:
        raise ItemErrors(failures, [None if str(job) in failures else job.final for job in jobs])
    return [job.final for job in jobs]


class _Job(NamedTuple):
    """An archive, and the folder that it becomes."""

    archive: Path
    final: Path

    def __str__(self) -> str:
        return str(self.archive)

    @property
    def work(self) -> Path:
        """Folder with the record of the archive, and with what is extracted of it until that is whole."""
        return self.final.parent / WORK / self.final.name

    @property
    def tree(self) -> Path:
        return self.work / "tree"

    @property
    def record_path(self) -> Path:
        return self.work / "record.json"

    def make_record(self) -> dict:
        """What tells the archive from another one of its name."""
        status = self.archive.stat()
        return {"archive": self.archive.name, "bytes": status.st_size, "mtime_ns": status.st_mtime_ns}

    def is_recorded(self) -> bool:
        return holds_record(self.record_path, self.make_record())

    def has_free_place(self) -> bool:
        """Whether nothing is where the folder goes but, at most, an empty folder."""
        return not os.path.lexists(self.final) or (self.final.is_dir() and not any(self.final.iterdir()))

    def plan(self) -> Plan:
        with TarStream(self.archive) as members:
            return plan_members(str(self.archive), members)


def _map_jobs(function: Callable, jobs: list[_Job], **options: Any) -> tuple[dict[_Job, Any], dict[str, str]]:
    """Results of the jobs that did not fail, and the failures by archive."""
    try:
        return dict(zip(jobs, map_items(function, jobs, **options), strict=True)), {}
    except ItemErrors as errors:
        results = zip(jobs, errors.results, strict=True)
        return {job: result for job, result in results if str(job) not in errors.failures}, errors.failures


def _make_jobs(archives: str | os.PathLike | Iterable[str | os.PathLike], root: Path) -> list[_Job]:
    archive_of: dict[str, Path] = {}
    jobs = []
    for archive in [archives] if isinstance(archives, (str, os.PathLike)) else archives:
        archive = Path(archive).absolute()
        if not archive.is_file():
            raise FileNotFoundError(f"{archive} is not a file")
        name = _folder_name(archive)
        other = archive_of.setdefault(name, archive)
        if other != archive:
            raise ValueError(f"{other} and {archive} would share a folder: extract them under different roots")
        jobs.append(_Job(archive, root / name))
    return jobs


def _folder_name(archive: Path) -> str:
    endings = "|".join(map(re.escape, TAR_SUFFIXES))
    if found := re.fullmatch(rf"([^.].*?)({endings})", archive.name, re.DOTALL):
        return found[1]
    raise ValueError(f"{archive.name} gives no name for a folder: add one of {' '.join(TAR_SUFFIXES)} to a name")


def _is_extracted(job: _Job) -> bool:
    return job.final.is_dir() and job.is_recorded()


def _missing_bytes(job: _Job) -> int:
    """Space that the archive still needs. Its headers are checked on the way."""
    if not job.has_free_place():
        return 0
    plan = job.plan()
    is_begun = job.is_recorded()
    return sum(
        -(-size // _BLOCK_BYTES) * _BLOCK_BYTES
        for number, size in plan.sizes.items()
        if number in plan.places and not (is_begun and (job.tree / plan.places[number][0]).exists())
    )


def _check_space(root: Path, needed: int) -> None:
    existing = next(folder for folder in (root, *root.parents) if folder.is_dir())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise OSError(f"{root}: {needed} bytes are needed and {free} are free: make room, or choose another disk")


def _extract(verify: bool, progress: bool, job: _Job) -> None:
    with file_lock(sibling_path(job.work, ".lock")):
        if job.has_free_place():
            _unpack(job, verify, progress)
            job.tree.rename(job.final)
        else:
            _check_extracted(job, verify)


def _unpack(job: _Job, verify: bool, progress: bool) -> None:
    plan = job.plan()
    if not job.is_recorded():
        shutil.rmtree(job.work, ignore_errors=True)
        job.work.mkdir(mode=0o700)  # so that nobody else changes what is half done
        write_record(job.record_path, job.make_record())
    unpack(job.archive, plan, job.tree, progress)
    if verify and (found := find_differences(job.archive, plan, job.tree)):
        shutil.rmtree(job.tree)
        raise OSError(f"{job.archive}: what was written is not what was read ({_first_few(found)}): is the disk sound?")


def _check_extracted(job: _Job, verify: bool) -> None:
    """The folder that is there must be this archive's, by its record or, with `verify`, by its bytes."""
    if verify:
        if found := find_differences(job.archive, job.plan(), job.final):
            raise OSError(f"{job.final} differs from {job.archive} ({_first_few(found)}): remove the folder, run again")
        write_record(job.record_path, job.make_record())
    elif not job.is_recorded():
        raise FileExistsError(f"{job.final} was not extracted from {job.archive} as it is now: remove it, or verify it")


def _first_few(found: list[str]) -> str:
    return "; ".join(found[:5]) + (f"; and {len(found) - 5} more" if len(found) > 5 else "")
