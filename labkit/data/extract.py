"""Extract tars, each into a folder of its own that appears whole, whatever is killed on the way.

What may come out of a tar is decided from its headers alone, before anything is written. `tarfile`'s own filter asks
the filesystem where a name would lead, and was led astray there (CVE-2025-4517 and others). Here names alone decide,
and no symbolic link is ever made: a link in the archive becomes another name of its target's file.
"""

import errno
import filecmp
import os
import posixpath
import re
import shutil
import tarfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from decimal import Decimal
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from labkit.data.tar_members import TAR_SUFFIXES
from labkit.data.tar_stream import TarStream
from labkit.errors import ArgumentError, ItemErrors, MissingFileError, StorageError, UnsafeTarError
from labkit.util.arguments import MAX_MEMBERS, MAX_PATH_BYTES
from labkit.util.files import file_lock, holds_record, path_from_key, sibling_path, write_record
from labkit.util.parallel import check_engine, map_items
from labkit.util.process import progress_bar

WORK = ".extract"  # folder under the root: what each folder came from, and what is still being extracted
_BLOCK_BYTES = 4096  # of the filesystem, to estimate the space that a file takes
_MAX_PART_BYTES = 255  # NAME_MAX of Linux
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


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
    Links to files of the archive become hard links, or copies where the filesystem has none.

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
            unsafe (a name or a link leads out of the folder, a member is a device), has a link to what is not a file
            in it, exceeds a limit, is cut, damaged or goes on after its end, differs from the folder that is there,
            or has names that differ in case alone where case is ignored.

    Taught in: notebooks/09_marigold_storage.ipynb
    """
    check_engine(engine, num_workers, address)
    root = Path(root).absolute()
    jobs = _make_jobs(archives, root)
    run = partial(_map_jobs, engine=engine, num_workers=num_workers, address=address, unit="archive")
    pending = [job for job in jobs if verify or not (job.final.is_dir() and job.is_recorded())]
    missing_bytes, failures = run(_missing_bytes, pending, progress=progress, description="check")

    needed = sum(missing_bytes.values())
    existing = next(folder for folder in (root, *root.parents) if folder.is_dir())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise StorageError(f"{root}: {needed} bytes are needed and {free} are free: make room, or choose another disk")

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

    def is_recorded(self) -> bool:
        """Whether the work or the final folder is of this very archive."""
        return holds_record(self.work / "record.json", self._record())

    def write_record(self) -> None:
        write_record(self.work / "record.json", self._record())

    def _record(self) -> dict:
        status = self.archive.stat()
        return {"archive": self.archive.name, "bytes": status.st_size, "mtime_ns": status.st_mtime_ns}

    def has_free_place(self) -> bool:
        """Whether nothing is where the folder goes but, at most, an empty folder."""
        return not os.path.lexists(self.final) or (self.final.is_dir() and not any(self.final.iterdir()))


def _make_jobs(archives: str | os.PathLike | Iterable[str | os.PathLike], root: Path) -> list[_Job]:
    archive_of: dict[str, Path] = {}
    jobs = []
    endings = "|".join(map(re.escape, TAR_SUFFIXES))
    for archive in [archives] if isinstance(archives, (str, os.PathLike)) else archives:
        archive = Path(archive).absolute()
        if not archive.is_file():
            raise MissingFileError(f"{archive} is not a file")
        named = re.fullmatch(rf"([^.].*?)({endings})", archive.name, re.DOTALL)
        if named is None:
            raise ArgumentError(
                f"{archive.name} gives no name for a folder: add one of {' '.join(TAR_SUFFIXES)} to a name"
            )
        other = archive_of.setdefault(named[1], archive)
        if other != archive:
            raise ArgumentError(f"{other} and {archive} would share a folder: extract them under different roots")
        jobs.append(_Job(archive, root / named[1]))
    return jobs


def _map_jobs(function: Callable, jobs: list[_Job], **options: Any) -> tuple[dict[_Job, Any], dict[str, str]]:
    """Results of the jobs that did not fail, and the failures by archive."""
    try:
        return dict(zip(jobs, map_items(function, jobs, **options), strict=True)), {}
    except ItemErrors as errors:
        results = zip(jobs, errors.results, strict=True)
        return {job: result for job, result in results if str(job) not in errors.failures}, errors.failures


def _missing_bytes(job: _Job) -> int:
    """Space that the archive still needs. Its headers are checked on the way."""
    if not job.has_free_place():
        return 0
    plan, is_begun = _plan_members(job.archive), job.is_recorded()
    return sum(
        -(-plan.sizes[number] // _BLOCK_BYTES) * _BLOCK_BYTES
        for number, paths in plan.paths.items()
        if number in plan.sizes and not (is_begun and (job.tree / paths[0]).exists())
    )


def _extract(verify: bool, progress: bool, job: _Job) -> None:
    with file_lock(sibling_path(job.work, ".lock")):
        if job.has_free_place():
            plan = _plan_members(job.archive)
            if not job.is_recorded():
                shutil.rmtree(job.work, ignore_errors=True)
                job.work.mkdir(mode=0o700)  # so that nobody else changes what is half done
                job.write_record()
            _fill_tree(job, plan, progress)
            if verify and (found := _find_differences(job.archive, plan, job.tree)):
                shutil.rmtree(job.tree)
                raise StorageError(
                    f"{job.archive}: what was written is not what was read ({found}): is the disk sound?"
                )
            job.tree.rename(job.final)
        elif verify:
            if found := _find_differences(job.archive, _plan_members(job.archive), job.final):
                raise StorageError(f"{job.final} differs from {job.archive} ({found}): remove the folder, run again")
            job.write_record()
        elif not job.is_recorded():
            raise FileExistsError(
                f"{job.final} was not extracted from {job.archive} as it is now: remove it, or verify it"
            )


# What each member becomes, by its name.


class _Plan(NamedTuple):
    """What each member becomes. Of several with one name the last counts, as with `tar -x`.

    Args:
        paths: Number of a member in the archive -> the paths that it fills; several if links lead to it.
        sizes: Number of a member -> bytes of its data; files only.
    """

    paths: dict[int, list[str]]
    sizes: dict[int, int]


def _plan_members(archive: Path) -> _Plan:
    """The plan for an archive; UnsafeTarError names the member that must not be extracted, and why."""
    filled: dict[str, int] = {}  # path -> number of the member that it has its data from
    sizes: dict[int, int] = {}
    links: dict[int, str] = {}  # number of a symbolic link -> the path that it leads to, by names alone
    plan = _Plan({}, sizes)
    name = ""
    try:
        with TarStream(archive) as members:
            for number, info in enumerate(members):
                name = info.name
                if number == MAX_MEMBERS:
                    raise ArgumentError(f"is one more than the {MAX_MEMBERS} that labkit extracts from one archive")
                path = safe_path(name)
                if info.islnk():
                    target = safe_path(info.linkname)
                    number = filled.get(target, -1)
                    if number not in sizes and number not in links:
                        raise ArgumentError(
                            f"is a hard link to {target!r}, which is not a file before it in the archive"
                        )
                elif info.issym():
                    _check_length(info.linkname)
                    target = posixpath.join(posixpath.dirname(path), path_from_key(info.linkname))
                    links[number] = posixpath.normpath(target)
                elif info.isreg():
                    sizes[number] = info.size
                elif info.isdev():
                    raise ArgumentError("is a device or a pipe")
                elif not info.isdir():
                    raise ArgumentError(f"is of unknown type {info.type!r}")
                if not path and not info.isdir():
                    raise ArgumentError("has no name")
                filled[path] = number

        # A path under which others lie is followed by one of them where the slash is sorted as the first letter. A set
        # of all folders above a path would take memory with the square of its depth.
        ordered = sorted(filled, key=lambda path: path.replace("/", "\0"))
        folders = {path for path, following in pairwise(ordered) if following.startswith(path + "/")}
        for path, number in filled.items():
            name = path or "."
            if path in folders and (number in sizes or number in links):
                raise ArgumentError("is a folder to other members, and a link or a file itself")
            leads_to = links.get(number)
            for _ in range(40):  # as many as Linux follows
                if number not in links:
                    break
                number = filled.get(links[number], -1)
            if leads_to is not None and number not in sizes:
                raise ArgumentError(
                    f"is a link to {leads_to!r}, which is not a file in the archive (`tar --dereference` packs what "
                    "links lead to)"
                )
            plan.paths.setdefault(number, []).append(path)
    except ValueError as error:
        shown = name if len(name) <= MAX_PATH_BYTES else name[:200] + "..."
        raise UnsafeTarError(f"{archive}: member {shown!r} {error}. Nothing of the archive was extracted") from error
    return plan


def safe_path(name: str) -> str:
    """`name` without `.` and doubled slashes, "" for the archive's own folder.

    Raises:
        ValueError: it would leave the folder, or no file can have it.
    """
    _check_length(name)
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if (longest := max(map(_n_bytes, parts), default=0)) > _MAX_PART_BYTES:
        raise ArgumentError(f"has {longest} bytes in a part of its name, where a file has at most {_MAX_PART_BYTES}")
    if name.startswith("/"):
        raise ArgumentError("is an absolute name")
    if ".." in parts:
        raise ArgumentError("has `..` in its name")
    if "\0" in name:
        raise ArgumentError("has a zero byte in its name")
    return path_from_key("/".join(parts))


def _check_length(path: str) -> None:
    """Refuse what is longer than a path can be: memory and time for it would grow with the square of its depth."""
    if (n_bytes := _n_bytes(path)) > MAX_PATH_BYTES:
        raise ArgumentError(f"has a path of {n_bytes} bytes, where a file has at most {MAX_PATH_BYTES}")


def _n_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogateescape"))


def _planned_members(stream: TarStream, plan: _Plan) -> Iterator[tuple[tarfile.TarInfo, list[str]]]:
    """Members that fill paths, with these paths."""
    for number, info in enumerate(stream):
        if number in plan.paths:
            yield info, plan.paths[number]


# Their files.


def _fill_tree(job: _Job, plan: _Plan, progress: bool) -> None:
    """Fill the job's tree; what it has already is whole and stays. The file being written is `half`, beside it."""
    job.tree.mkdir(exist_ok=True)
    if _ignores_case(job.tree):
        seen: dict[str, str] = {}
        for path in (path for paths in plan.paths.values() for path in paths):
            if (other := seen.setdefault(path.casefold(), path)) != path:
                raise ArgumentError(
                    f"{job.archive}: members {other!r} and {path!r} are one file here: choose another filesystem"
                )
    half = job.work / "half"
    half.unlink(missing_ok=True)  # it may be a hard link to a whole file, which writing would spoil
    times: dict[str, int] = {}
    options = {"total": sum(plan.sizes.values()), "unit": "B", "unit_scale": True, "desc": job.archive.name}
    with TarStream(job.archive) as stream, progress_bar(show=progress, **options) as bar:
        for info, paths in _planned_members(stream, plan):
            if info.isdir():
                times[paths[0]] = _mtime_ns(info)
                with _open_folder(job.tree, paths[0]):
                    continue
            for path in paths:
                parent, _, name = path.rpartition("/")
                with _open_folder(job.tree, parent) as folder:
                    if os.access(name, os.F_OK, dir_fd=folder, follow_symlinks=False):
                        continue
                    if path == paths[0]:
                        _write_file(stream, info, half)
                    else:
                        _link_file(job.tree, paths[0], half)
                    os.rename(half, name, dst_dir_fd=folder)
            bar.update(info.size)
        for path, time_ns in times.items():  # last: a new file would change the time of its folder
            with _open_folder(job.tree, path) as folder:
                os.utime(folder, ns=(time_ns, time_ns))


def _ignores_case(tree: Path) -> bool:
    return tree.with_name(tree.name.upper()).exists()


@contextmanager
def _open_folder(top: Path, path: str) -> Iterator[int]:
    """A descriptor of a folder below `top`, which is made if missing. No step on the way follows a link.

    Raises:
        OSError: another process has put a link or a file where a folder was; nothing is written behind it.
    """
    descriptor = os.open(top, _OPEN_FOLDER)
    try:
        for part in filter(None, path.split("/")):
            parent = descriptor
            try:
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=parent)
                descriptor = os.open(part, _OPEN_FOLDER, dir_fd=parent)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOTDIR):
                    found = f"{top / path}: {part!r} is a link or a file where a folder was"
                    raise StorageError(f"{found}: another process writes here") from error
                raise
            os.close(parent)
        yield descriptor
    finally:
        os.close(descriptor)


def _write_file(stream: TarStream, info: tarfile.TarInfo, half: Path) -> None:
    mode = info.mode & (0o755 if info.mode & 0o100 else 0o644) | 0o600  # as tarfile's data filter
    with open(half, "xb", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, mode)) as file:  # less umask
        for block in stream.blocks(info):
            file.write(block)
    time_ns = _mtime_ns(info)
    os.utime(half, ns=(time_ns, time_ns))


def _link_file(tree: Path, path: str, half: Path) -> None:
    """Make `half` another name of the file at `path`; a copy, where the filesystem has no hard links."""
    parent, _, name = path.rpartition("/")
    with _open_folder(tree, parent) as folder:
        try:
            os.link(name, half, src_dir_fd=folder, follow_symlinks=False)
        except OSError:
            shutil.copy2(tree / path, half, follow_symlinks=False)


def _mtime_ns(info: tarfile.TarInfo) -> int:
    """When the member was written; 0 if it says nothing that a file's time can be."""
    try:  # not tarfile's float, which cannot hold nanoseconds
        time_ns = Decimal(info.pax_headers.get("mtime", info.mtime)) * 10**9
        return int(time_ns) if abs(time_ns) < 1 << 63 else 0
    except (ArithmeticError, ValueError):
        return 0


def _find_differences(archive: Path, plan: _Plan, tree: Path) -> str:
    """The first differences between the members under `tree` and those of the archive; more files may lie there."""
    found = []
    with TarStream(archive) as stream:
        for info, paths in _planned_members(stream, plan):
            for path in paths:
                if difference := _find_difference(stream, info, tree / path, tree / paths[0]):
                    found.append(f"{path or '.'!r} {difference}")
                    break  # the other paths are compared with the first
    return "; ".join(found[:5]) + (f"; and {len(found) - 5} more" if len(found) > 5 else "")


def _find_difference(stream: TarStream, info: tarfile.TarInfo, path: Path, first: Path) -> str:
    """How the file at `path` differs from the member; `first` is the path that was compared with it before."""
    if not os.path.lexists(path):
        return "is missing"
    if info.isdir():
        return "" if path.is_dir() else "is not a folder"
    if path.is_symlink() or not path.is_file():
        return "is not a file"
    if (size := path.stat().st_size) != info.size:
        return f"has {size} bytes, not {info.size}"
    if path != first:
        return "" if filecmp.cmp(first, path, shallow=False) else "has other contents"
    with open(path, "rb") as file:
        is_same = all(file.read(len(block)) == block for block in stream.blocks(info))
    return "" if is_same else "has other contents"
