"""Extract tars, each into a folder of its own that appears whole, whatever is killed on the way."""

import os
import re
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from itertools import filterfalse
from pathlib import Path
from typing import Any, NamedTuple

from labkit.core import file_lock, holds_record, sibling_path, write_record
from labkit.core.mapping import ItemErrors, check_engine, map_items
from labkit.data.extract.files import find_differences, unpack
from labkit.data.extract.plan import Plan, plan_members
from labkit.data.tar import TAR_SUFFIXES, TarStream

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
            unsafe (`plan_members`), exceeds a limit of `labkit.core.limits`, is cut, damaged or goes on after its end,
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
