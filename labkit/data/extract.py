"""Extract tars, each into a folder of its own that appears whole, whatever is killed on the way.

What may come out of a tar is decided from its headers alone, before anything is written. `tarfile`'s own filter asks
the filesystem where a name would lead, and was led astray there (CVE-2025-4517 and others). Here names alone decide,
and no link is ever made: a link in the archive becomes a copy of its target's file.
"""

import os
import posixpath
import re
import shutil
import tarfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from labkit.data.tar_stream import TAR_SUFFIXES, TarStream
from labkit.errors import ArgumentError, ItemErrors, MissingFileError, StorageError, UnsafeTarError
from labkit.util.arguments import require_local_path
from labkit.util.files import file_lock, holds_record, path_from_key, sibling_path, write_record
from labkit.util.parallel import map_items
from labkit.util.process import progress_bar

WORK = ".extract"  # folder under the root: what each folder came from, and what is being extracted
_MAX_PATH_BYTES = 4096  # PATH_MAX of Linux: nothing could open a longer one
_MAX_DEPTH = 500  # Python makes, walks and removes folders by functions that call themselves


def extract_tars(
    archives: str | os.PathLike | Iterable[str | os.PathLike],
    root: str | os.PathLike,
    *,
    engine: str = "local",
    num_workers: int | None = None,
    address: str | None = None,
    progress: bool = True,
) -> list[Path]:
    """Extract each archive into a folder of its own: `n01440764.tar` into `root/n01440764`, as ImageNet is laid out.

    A folder appears under its name when all of it is there. Until then it is in the hidden folder `root/.extract`. A
    rerun after a kill skips the archives that are done, and begins the others anew. Modification times of files are
    kept; of permissions, only whether a file can be executed. Of several members with one name the last counts. A link
    to a file of the archive becomes a copy of it.

    Args:
        archives: One tar or several, plain or compressed (gzip, bzip2, xz).
        root: Folder for their folders; made if missing.
        engine, num_workers, address: As in `map_items`; an item is an archive.
        progress: Show a live bar: of archives; of bytes, if there is only one.

    Returns:
        The folders, in the order of the archives.

    Raises:
        FileNotFoundError: no such archive.
        ValueError: an archive's name gives no folder, or two give the same.
        OSError: the disk is full; names the archive. What there is of it is removed, and no other begins.
        ItemErrors: some archives failed; names them, the others are extracted. An archive is refused whole if it is
            unsafe (a name leads out of the folder, a member is a device), has a link to what is not a file in it, is
            cut, damaged or goes on after its end, or if its folder is there and was not made of it as it is now.

    >>> extract_tars("photos.tar", "data", progress=False)
    [PosixPath('.../data/photos')]
    """
    jobs = _make_jobs(archives, require_local_path("root", root).absolute())
    pending = [job for job in jobs if not job.is_done()]
    shows_archives = progress and len(pending) > 1  # one archive runs in this process, and has its own bar
    try:
        map_items(
            partial(_extract, progress and not shows_archives and engine != "ray"),
            pending,
            engine=engine,
            num_workers=num_workers,
            address=address,
            progress=shows_archives,
            description="extract",
            unit="archive",
        )
    except ItemErrors as errors:
        failures = errors.failures
        raise ItemErrors(failures, [None if str(job) in failures else job.final for job in jobs]) from None
    return [job.final for job in jobs]


class _Job(NamedTuple):
    """An archive, and the folder that it becomes."""

    archive: Path
    final: Path

    def __str__(self) -> str:
        return str(self.archive)

    @property
    def work(self) -> Path:
        """Folder with the record of the archive, and with `tree`, what is extracted of it until that is whole."""
        return self.final.parent / WORK / self.final.name

    def record(self) -> dict:
        status = self.archive.stat()
        return {"archive": self.archive.name, "bytes": status.st_size, "mtime_ns": status.st_mtime_ns}

    def is_recorded(self) -> bool:
        """Whether what is there was made of this very archive."""
        return holds_record(self.work / "record.json", self.record())

    def is_done(self) -> bool:
        return self.final.is_dir() and self.is_recorded()


def _make_jobs(archives: str | os.PathLike | Iterable[str | os.PathLike], root: Path) -> list[_Job]:
    jobs: dict[str, _Job] = {}
    endings = "|".join(map(re.escape, TAR_SUFFIXES))
    several: Any = archives
    if isinstance(archives, str | bytes | os.PathLike) or not isinstance(archives, Iterable):
        several = [archives]
    for archive in several:
        archive = require_local_path("an archive", archive).absolute()
        if not archive.is_file():
            raise MissingFileError(f"{archive} is not a file")
        named = re.fullmatch(rf"([^.].*?)({endings})", archive.name, re.DOTALL | re.IGNORECASE)
        if named is None:
            raise ArgumentError(
                f"{archive.name} gives no name for a folder: add one of {' '.join(TAR_SUFFIXES)} to a name"
            )
        if named[1] in jobs:
            raise ArgumentError(
                f"{jobs[named[1]]} and {archive} would share a folder: extract them under different roots"
            )
        jobs[named[1]] = _Job(archive, root / named[1])
    return list(jobs.values())


def _extract(progress: bool, job: _Job) -> None:
    paths, n_bytes = _plan_members(job.archive)  # before anything is made
    with file_lock(sibling_path(job.work, ".lock")):
        if job.is_done():  # by another process, while this one waited
            return
        if os.path.lexists(job.final):
            raise FileExistsError(
                f"{job.final} was not extracted from {job.archive} as it is now: choose "
                "another root, or move that folder away"
            )
        shutil.rmtree(job.work, ignore_errors=True)  # of a run that was killed
        job.work.mkdir(mode=0o700)  # so that nobody else changes what is half done
        try:
            write_record(job.work / "record.json", job.record())
            with progress_bar(show=progress, total=n_bytes, unit="B", unit_scale=True, desc=job.archive.name) as bar:
                _fill_tree(job, paths, bar.update)
            (job.work / "tree").rename(job.final)
        except BaseException:
            shutil.rmtree(job.work, ignore_errors=True)
            raise


def _plan_members(archive: Path) -> tuple[dict[int, list[str]], int]:
    """What each member becomes: its number in the archive -> the paths that it fills, several if links lead to it.

    Returns:
        The paths, and the bytes of all files.

    Raises:
        UnsafeTarError: names the member that must not be extracted, and why.
    """
    filled: dict[str, int] = {}  # path -> number of the member that it has its data from
    links: dict[str, str] = {}  # symbolic link -> the path that it leads to
    sizes: dict[int, int] = {}  # of files
    name = ""
    try:
        with TarStream(archive) as members:
            for number, info in enumerate(members):
                name = info.name
                path = safe_path(name)
                if not (info.isreg() or info.isdir() or info.islnk() or info.issym()):
                    raise ArgumentError("is a device, a pipe or of unknown type")
                if not path and not info.isdir():
                    raise ArgumentError("has no name")
                target = None
                if info.isreg():
                    sizes[number] = info.size
                elif info.islnk():
                    earlier = safe_path(info.linkname)
                    target, number = links.get(earlier), filled.get(earlier, -1)
                    if number not in sizes and target is None:
                        raise ArgumentError(f"is a hard link to {earlier!r}, which is not a file before it")
                elif info.issym():
                    target = posixpath.join(posixpath.dirname(path), path_from_key(info.linkname))
                filled[path] = number
                links.pop(path, None)
                if target is not None:
                    links[path] = posixpath.normpath(target)
        paths: dict[int, list[str]] = {}
        for path, number in filled.items():
            name = target = path
            for _ in range(40):  # as many as Linux follows
                target = links.get(target, target)
            number = filled.get(target, -1)
            if path in links and (target in links or number not in sizes):
                raise ArgumentError(
                    f"is a link to {links[path]!r}, which is not a file in the archive (`tar --dereference` packs what "
                    "links lead to)"
                )
            paths.setdefault(number, []).append(path)
    except ValueError as error:
        raise UnsafeTarError(f"{archive}: member {name[:200]!r} {error}. Nothing of it was extracted") from error
    return paths, sum(sizes.values())


def safe_path(name: str) -> str:
    """`name` without `.` and doubled slashes, "" for the archive's own folder. ValueError if it leads elsewhere."""
    if len(name.encode("utf-8", "surrogateescape")) > _MAX_PATH_BYTES:
        raise ArgumentError(f"is longer than a path can be ({_MAX_PATH_BYTES} bytes)")
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if len(parts) > _MAX_DEPTH:
        raise ArgumentError(f"lies {len(parts)} folders deep, where {_MAX_DEPTH} are allowed")
    if name.startswith("/"):
        raise ArgumentError("is an absolute name")
    if ".." in parts:
        raise ArgumentError("has `..` in its name")
    if "\0" in name:
        raise ArgumentError("has a zero byte in its name")
    return path_from_key("/".join(parts))


def _fill_tree(job: _Job, paths: dict[int, list[str]], count_bytes: Callable[[int], object]) -> None:
    tree, n_planned = job.work / "tree", 0
    tree.mkdir()
    with TarStream(job.archive) as stream:
        for number, info in enumerate(stream):
            targets = [tree / path for path in paths.get(number, ())]
            for target in targets:
                (target if info.isdir() else target.parent).mkdir(parents=True, exist_ok=True)
            if targets and not info.isdir():
                _write_file(stream, info, targets[0])
                for target in targets[1:]:
                    shutil.copy2(targets[0], target)
                n_planned += len(targets)
            count_bytes(info.size)
    n_files = sum(len(names) for _, _, names in os.walk(tree))
    if n_files != n_planned or not job.is_recorded():
        raise StorageError(
            f"{job.archive}: {n_files} of {n_planned} files are in {tree}: did the archive change, or are names that "
            "differ in case alone one file on this disk? Run again, or choose another disk"
        )


def _write_file(stream: TarStream, info: tarfile.TarInfo, path: Path) -> None:
    mode = 0o777 if info.mode & 0o100 else 0o666  # less the umask
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        for block in stream.blocks(info):
            file.write(block)
    with suppress(OverflowError, ValueError, OSError):  # a time that no file can have
        os.utime(path, (info.mtime, info.mtime))
