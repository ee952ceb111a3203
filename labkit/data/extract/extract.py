"""Tars extracted, each into a folder of its own that appears whole, whatever is killed on the way."""

import json
import os
import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from labkit.core import file_lock, sibling_path, write_atomic
from labkit.core.mapping import ItemErrors, check_engine, map_items
from labkit.data.extract.files import differences, unpack
from labkit.data.extract.plan import Plan, plan_members
from labkit.data.tar import TarStream

WORK = ".extract"  # under the root: what each folder came from, and what is still being extracted
_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")
_BLOCK_BYTES = 4096  # of the filesystem, for the estimate of the space that a file takes


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

    ImageNet's archive of archives takes two calls: one for it, one for the thousand that it holds.

    A folder appears under its name when all of it is there. A killed run is taken up where it was: members that are
    whole are kept, in a hidden folder `root/.extract`, which is also how a rerun knows what is done. Modification
    times are kept; owners, set-user-id bits, others' write permission and what the umask takes away are not. Of
    several members with one name the last counts, as with `tar -x`. Names that differ in case alone are refused where
    the filesystem ignores case.

    Args:
        archives: One tar or several, plain or compressed (gzip, bzip2, xz; zstd from Python 3.14 on).
        root: Folder for their folders; made if missing.
        engine: As in `map_items`; an item is an archive.
        num_workers: As in `map_items`.
        address: Of the cluster, with `engine="ray"`.
        verify: Compare what was extracted with the archive, byte for byte; what an earlier run extracted, too. What
            was just written may come from memory: a run after it, with nothing in memory, also proves the disk.
        progress: Show a live bar: of archives; of bytes, if there is only one.

    Returns:
        The folders, in the order of the archives.

    Raises:
        FileNotFoundError: no such archive.
        ValueError: an archive's name gives no folder, or two give the same.
        OSError: too little space for what is still to be extracted; names both numbers of bytes. Nothing is extracted.
        ItemErrors: some archives failed; names them, the others are extracted. One is refused whole, before any of it
            is written, if a member has an absolute name or `..` in it, lies behind a link, is a device or a pipe, or
            is a link that leads out of the folder or through another link; and if it has more members than
            `labkit.core.limits` states, or larger headers. Or it is cut or damaged, differs from the
            folder that is there, or that folder came from elsewhere.

    Taught in: notebooks/09_marigold_storage.ipynb
    """
    check_engine(engine, num_workers, address)
    one = isinstance(archives, (str, os.PathLike))
    archives = [Path(archive).absolute() for archive in ([archives] if one else archives)]
    root = Path(root).absolute()
    folders = _folders(archives, root)
    run = partial(map_items, engine=engine, num_workers=num_workers, address=address, unit="archive")
    left = [archive for archive in archives if verify or not _is_extracted(root, archive)]
    missing_bytes, failures = _kept_going(
        partial(run, progress=progress, description="check"), partial(_missing_bytes, root), left
    )
    _check_space(root, sum(missing_bytes.values()))
    # One archive runs in this process, and has its own bar.
    bars = {"progress": progress and len(missing_bytes) > 1, "description": "extract"}
    extract = partial(_extract, root, verify, progress and not bars["progress"] and engine != "ray")
    _, more = _kept_going(partial(run, **bars), extract, list(missing_bytes))
    if failures or more:
        done = [None if str(archive) in failures | more else folders[archive] for archive in archives]
        raise ItemErrors(failures | more, done)
    return [folders[archive] for archive in archives]


def _kept_going(run: partial, function: partial, archives: list[Path]) -> tuple[dict[Path, object], dict[str, str]]:
    """Results by archive, of those that did not fail, and the failures."""
    try:
        return dict(zip(archives, run(function, archives), strict=True)), {}
    except ItemErrors as errors:
        pairs = zip(archives, errors.results, strict=True)
        return {archive: result for archive, result in pairs if str(archive) not in errors.failures}, errors.failures


def _folders(archives: list[Path], root: Path) -> dict[Path, Path]:
    """Where each archive goes."""
    archive_of: dict[str, Path] = {}
    for archive in archives:
        if not archive.is_file():
            raise FileNotFoundError(f"{archive} is not a file")
        other = archive_of.setdefault(_folder_name(archive), archive)
        if other != archive:
            raise ValueError(f"{other} and {archive} would share a folder: extract them under different roots")
    return {archive: root / name for name, archive in archive_of.items()}


def _folder_name(archive: Path) -> str:
    for suffix in sorted(_SUFFIXES, key=len, reverse=True):
        name = archive.name.removesuffix(suffix)
        if name != archive.name and not name.startswith(".") and name:
            return name
    raise ValueError(f"{archive.name} gives no name for a folder: it must be a name and one of {' '.join(_SUFFIXES)}")


def _work(root: Path, archive: Path) -> Path:
    return root / WORK / _folder_name(archive)


def _record(archive: Path) -> bytes:
    """What is written down of an archive, so that another one of its name is not taken for it."""
    status = archive.stat()
    return json.dumps({"archive": archive.name, "bytes": status.st_size, "mtime_ns": status.st_mtime_ns}).encode()


def _is_recorded(root: Path, archive: Path) -> bool:
    record = _work(root, archive) / "record.json"
    return record.is_file() and record.read_bytes() == _record(archive)


def _is_extracted(root: Path, archive: Path) -> bool:
    return (root / _folder_name(archive)).is_dir() and _is_recorded(root, archive)


def _is_free(final: Path) -> bool:
    """Nothing lies there but, at most, an empty folder."""
    return not os.path.lexists(final) or (final.is_dir() and not any(final.iterdir()))


def _missing_bytes(root: Path, archive: Path) -> int:
    """Space that the archive still needs, once its headers are found safe."""
    if not _is_free(root / _folder_name(archive)):
        return 0
    plan, tree = _plan(archive), _work(root, archive) / "tree"
    is_kept = _is_recorded(root, archive)
    return sum(
        -(-size // _BLOCK_BYTES) * _BLOCK_BYTES
        for number, size in plan.sizes.items()
        if number in plan.places and not (is_kept and (tree / plan.places[number][0]).exists())
    )


def _plan(archive: Path) -> Plan:
    with TarStream(archive) as members:
        return plan_members(str(archive), members)


def _check_space(root: Path, needed: int) -> None:
    existing = next(folder for folder in (root, *root.parents) if folder.is_dir())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise OSError(f"{root}: {needed} bytes are needed and {free} are free: make room, or choose another disk")


def _extract(root: Path, verify: bool, progress: bool, archive: Path) -> None:
    final, work = root / _folder_name(archive), _work(root, archive)
    with file_lock(sibling_path(work, ".lock")):
        if not _is_free(final):
            _check_extracted(root, archive, final, verify)
            return
        _unpack(root, archive, work, verify, progress)
        (work / "tree").rename(final)


def _unpack(root: Path, archive: Path, work: Path, verify: bool, progress: bool) -> None:
    plan, tree = _plan(archive), work / "tree"
    if not _is_recorded(root, archive):
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(mode=0o700)  # nobody else exchanges what is half done; the folder that appears is not in it any more
        write_atomic(work / "record.json", _record(archive))
    unpack(archive, plan, tree, progress)
    if verify and (found := differences(archive, plan, tree)):
        shutil.rmtree(tree)
        raise OSError(f"{archive}: what was written is not what was read ({_listed(found)}): is the disk sound?")


def _check_extracted(root: Path, archive: Path, final: Path, verify: bool) -> None:
    """The folder that is there must be this archive's, by its record or, if asked, by its bytes."""
    if not verify:
        if _is_recorded(root, archive):
            return
        raise FileExistsError(
            f"{final} exists, and was not extracted from {archive} as it is now: remove it, or compare them (verify)"
        )
    if found := differences(archive, _plan(archive), final):
        raise OSError(f"{final} differs from {archive} ({_listed(found)}): remove the folder and extract again")
    write_atomic(_work(root, archive) / "record.json", _record(archive))


def _listed(found: list[str]) -> str:
    return "; ".join(found[:5]) + (f"; and {len(found) - 5} more" if len(found) > 5 else "")
