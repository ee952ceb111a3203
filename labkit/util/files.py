"""Files and folders: names, locks, whole-file writes, resumed jobs, temporary folders, and one walk for all.

Files are written under a temporary name and renamed, so a reader never sees half of one, and a file that has its name
is whole. A job claims its folder with `claim_folder`: the first run writes a JSON record of what was asked for, a run
of the same job goes on from what is there, and any other job is refused. Locks hold until their file is closed or the
process ends, however it ends; some filesystems have none.
"""

import errno
import fcntl
import json
import math
import multiprocessing
import os
import re
import secrets
import shutil
import sys
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO

from labkit.errors import ArgumentError, LabkitError, OperationError, StorageError
from labkit.util.machine import labkit_home

# Hidden, or made by a system for itself: thumbnails and deleted files of a NAS or Windows, attributes of macOS' files.
_HIDDEN = re.compile(r"(?:^|/)(?:\.|(?:@eaDir|#recycle|\$RECYCLE\.BIN|__MACOSX|lost\+found)(?:/|$))")
_MAX_NAME_BYTES = 255  # on almost every filesystem
_NAMES_ARE_UTF8 = sys.getfilesystemencoding() == "utf-8"


def is_hidden(key: str) -> bool:
    """Whether a part of a key begins with a dot, or is a folder that a system keeps for itself, such as `__MACOSX`."""
    return _HIDDEN.search(key) is not None


def n_images(number: int) -> str:
    """A number of images in words, such as `2 images`."""
    return f"{number} image{'s' if number != 1 else ''}"


def first_folder(key: str) -> str:
    """The first folder of a key; "" if it has none."""
    folder, slash, _ = key.lstrip("/").partition("/")  # an object's name may begin with slashes
    return folder if slash else ""


def is_file_key(key: str) -> bool:
    """Whether a key can name a file below a folder: it does not lead out of the folder, and does not name a folder."""
    try:
        key.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half of a surrogate pair, which no file name holds
        return False
    parts = key.split("/")
    return parts[0] != "" and parts[-1] not in ("", ".") and ".." not in parts


def key_from_name(name: str) -> str:
    """A file name, as the system gives it, as a key: UTF-8, whatever the locale.

    In a C locale without Python's UTF-8 mode, names arrive as ASCII with all other bytes as surrogates.
    """
    return name if _NAMES_ARE_UTF8 else os.fsencode(name).decode("utf-8", "surrogateescape")


def path_from_key(key: str) -> str:
    """A key, or a name from an archive or a list, as the system takes it; ValueError if it cannot be a file name."""
    return key if _NAMES_ARE_UTF8 else os.fsdecode(key.encode("utf-8", "surrogateescape"))


def sibling_path(path: Path, ending: str, *, hidden: bool = False) -> Path:
    """`path` with an ending added to its name; if that is too long, a checksum takes the place of the name."""
    prefix = "." if hidden else ""
    name = f"{prefix}{path.name}{ending}"
    if len(os.fsencode(name)) > _MAX_NAME_BYTES:
        name = f"{prefix}{zlib.crc32(os.fsencode(path.name)):08x}{ending}"
    return path.with_name(name)


def acquire_lock(file: int | IO, *, wait: bool = True) -> None:
    """Lock an open file for this process, until the file is closed.

    Args:
        file: A file object or descriptor.
        wait: Wait while another process holds the lock.

    Raises:
        BlockingIOError: another process holds the lock, and `wait` is False.
        OSError: the filesystem has no locks.
    """
    fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


def open_locked(path: Path, mode: str) -> IO:
    """Open a file and lock it, unless the filesystem has no locks; repeated if it is removed before it is locked."""
    while True:
        # No symbolic link: the name of a lock can be guessed, and a link there would create a file elsewhere.
        file = open(path, mode, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666))  # noqa: SIM115
        with suppress(OSError):
            acquire_lock(file)
        with suppress(FileNotFoundError):  # the previous holder may have removed it: then this is another file
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        file.close()


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Wait until no other process holds `path`, then hold it; the file is removed with the lock.

    Makes missing folders.

    Raises:
        RuntimeError: a worker process is importing the script that started it, and that script takes the lock while
            it is imported: the worker would wait for its own parent.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise OperationError(
            'processes are started while the script is imported: call this under `if __name__ == "__main__":`'
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_locked(path, "a"):
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


_PARTIAL_NAME = re.compile(r"\.\d+-[0-9a-f]{8}\.partial")
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # errors of a write, which do not name the file


def require_room(folder: Path, n_bytes: float) -> None:
    """Refuse to begin what will not fit: about `n_bytes` in a folder, which need not be there yet.

    Raises:
        OSError: the disk has less room; says how much is needed and free. A user's quota is not known here.
    """
    if n_bytes > (free := free_bytes(folder)):
        raise StorageError(
            f"{folder} needs about {_told_bytes(n_bytes)}, and its disk has {_told_bytes(free)} free: make room, or "
            "choose a folder on another disk"
        )


def free_bytes(folder: Path) -> float:
    """Room on the disk of a folder, which need not be there yet; infinite where the system does not tell."""
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        return shutil.disk_usage(place).free
    except OSError:
        return math.inf


def _told_bytes(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:,.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:,.1f} MB"


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` under a temporary name, then rename: `path` is whole or unchanged. Makes missing folders."""
    with atomic_path(path) as partial:
        partial.write_bytes(data)


def write_all_atomic(contents: Mapping[Path, bytes]) -> None:
    """Write several files under temporary names, and rename them only when all have been written."""
    with ExitStack() as stack:
        for path, data in contents.items():
            stack.enter_context(atomic_path(path)).write_bytes(data)


@contextmanager
def atomic_path(path: Path, *, dated: bool = False) -> Iterator[Path]:
    """A temporary path next to `path`, renamed to it at the end and removed on an error. Makes missing folders.

    The first time that a process writes to a folder, it removes the partial files that killed processes left there.
    If the disk is full, the OSError names `path`. With `dated`, the file's time is that of its beginning: whatever was
    changed while it was written is newer.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers_once(path.parent.absolute())
    # Without `path.name`, which may have the longest length allowed; random, as containers on one disk share pids.
    partial = path.with_name(f".{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        with open_locked(partial, "xb") as file:  # never through a link or over another file
            began_ns = os.fstat(file.fileno()).st_mtime_ns
            yield partial
            if dated:
                os.utime(partial, ns=(began_ns, began_ns))
            partial.replace(path)
    except OSError as error:
        if error.errno in _NO_SPACE or error.filename == os.fspath(partial):
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        raise
    finally:
        partial.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Remove the partial files of killed processes. A writer that lives, on any machine, holds a lock on its own."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _PARTIAL_NAME.fullmatch(entry.name):
                # Not "ab": of a file that is gone it would make another, in the way of the writer that tries again.
                with suppress(OSError), open(entry.path, "r+b") as file:
                    acquire_lock(file, wait=False)
                    os.unlink(entry.path)


_remove_leftovers_once = cache(remove_leftovers)


REMEDY = "choose another folder, or remove what labkit made there"


@contextmanager
def writing_to(folder: Path, remedy: str = "") -> Iterator[None]:
    """Turn the system's error where nothing can be written to `folder` into a StorageError that names the remedy."""
    try:
        yield
    except OSError as error:
        # Another process may have ended the same job meanwhile, and removed what it no longer needs.
        if isinstance(error, LabkitError) or (isinstance(error, FileNotFoundError) and folder.exists()):
            raise
        with suppress(StorageError):  # a user without a home folder
            if not remedy and folder.absolute().is_relative_to(labkit_home().absolute()):
                folder, remedy = labkit_home(), "set LABKIT_HOME to another folder"
        raise StorageError(f"{folder} cannot be written to ({error}): {remedy or 'choose another folder'}") from error


def check_writable(folder: Path, remedy: str) -> None:
    """Make a folder, and write to it for a moment, before a long work whose results go there.

    Raises:
        StorageError: it cannot be made, or takes nothing; names it and the remedy.
    """
    with writing_to(folder, remedy):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_LEAST_ROOM))


_LEAST_ROOM = 1 << 20  # bytes, about those of a report's page


def claim_folder(folder: Path, record_name: str, record: dict, *, what: str, key: str | None = None) -> dict:
    """Claim `folder` for the job that `record` describes.

    Args:
        folder: Made if missing.
        record_name: The record's path inside `folder`. Its first part may exist before the record does.
        record: JSON object to write where there is none.
        what: What the job makes, for errors: `"photos"`.
        key: Entry of the record that must be the same in each run; the rest is progress. None: the whole record.

    Returns:
        The record in the folder: `record`, or the one that an earlier run left.

    Raises:
        ValueError: the folder holds something else, another job, or a damaged record; names the folder and the remedy.
    """
    if folder.exists() and not folder.is_dir():
        raise ArgumentError(f"{folder} is a file, and {what} go into a folder: choose another name")
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
    path, own_name = folder / record_name, Path(record_name).parts[0]
    # Listed before the record is read: another process that runs the same job may write it in between.
    foreign = foreign_names(folder, lambda name: name == own_name)
    found = read_record(path)
    if found is None:
        if foreign:
            raise ArgumentError(f"{folder} holds no {what}, but {foreign[0]!r}: choose a new folder, or an empty one")
        with writing_to(folder):
            write_record(path, record)
        return record
    with damage_named(path):
        check_same_job(folder, found if key is None else found[key], record if key is None else record[key], what=what)
    return found


def check_same_job(target: object, found: dict, asked: dict, *, what: str) -> None:
    """Raise ValueError where the record that made `target` is not the one asked for; it lists the differing entries."""
    if found != asked:
        names = [name for name in {**asked, **found} if found.get(name) != asked.get(name)]
        listed = ", ".join(
            f"{name.removesuffix('_sha256').replace('_', ' ')} differ"
            if name.endswith("_sha256")
            else f"{name} {found.get(name)!r}, not {asked.get(name)!r}"
            for name in names
        )
        raise ArgumentError(f"{target} holds other {what} ({listed}): {REMEDY}")


def foreign_names(folder: Path, is_own: Callable[[str], bool]) -> list[str]:
    """Sorted names in a folder that no run of the job wrote. Files that are being written do not count."""
    names = sorted(os.listdir(folder)) if folder.exists() else []
    return [name for name in names if not is_own(name) and not name.endswith(".partial")]


def read_record(path: Path) -> dict | None:
    """The JSON object in a file, or None where there is no file. ValueError, with the remedy, where it is damaged."""
    with suppress(FileNotFoundError), damage_named(path):
        return dict(json.loads(path.read_bytes()).items())
    return None


def write_record(path: Path, record: dict, *, indent: int | None = None) -> None:
    """Write a record whole or not at all. Makes missing folders."""
    write_atomic(path, json.dumps(record, indent=indent).encode())


def check_own_file(path: str | os.PathLike, beginning: str, *, what: str) -> None:
    """Refuse to write over a file that another program, or its user, wrote. To be called before the work begins.

    Args:
        path: Where a command will write.
        beginning: How all that it writes begins.
        what: What it writes, for errors: `"table of sizes"`.

    Raises:
        ValueError: something else is there than such a file or an empty one; names it and the remedy.
    """
    path, head = Path(path), beginning.encode()
    if path.is_dir():
        raise ArgumentError(f"{path} is a folder: name a file in it, or another name")
    if path.is_file():
        with open(path, "rb") as file:
            found = file.read(len(head))
        if found and found != head:
            raise ArgumentError(f"{path} exists and is no {what}: choose another name, or move that file away")


def holds_record(path: Path, record: dict) -> bool:
    """Whether a file holds this very record; a missing or damaged one does not."""
    with suppress(ValueError):
        return read_record(path) == record
    return False


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Turn what a record of the wrong shape raises into a ValueError that names the file and the remedy."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, RecursionError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ArgumentError(
            f"{path} is damaged, or not labkit's ({type(error).__name__}: {error}): {REMEDY}"
        ) from error


_PREFIX = "labkit-scratch-"
_PATTERN = _PREFIX + 8 * "[a-z0-9_]"  # the names that mkdtemp makes


class ScratchFolder:
    """A temporary folder, removed by `cleanup()`, the end of `with`, or of the process.

    A process that is killed, as a notebook's kernel may be, cannot remove its folder: the next `ScratchFolder` in the
    same place does. A folder in use is locked.

    Args:
        folder: Where to make it; missing folders are made. Default: next to the photos, and so on the same disk.

    Attributes:
        path: The folder.

    Raises:
        OSError: the folder cannot be made there.

    Taught in: notebooks/08_shard_formats.ipynb
    """

    def __init__(self, folder: Path | str | None = None):
        parent = Path(folder or labkit_home() / "photos").expanduser()
        with writing_to(parent):
            parent.mkdir(parents=True, exist_ok=True)
        for abandoned in parent.glob(_PATTERN):
            with suppress(OSError):  # in use, not a folder, or owned by another user
                lock = _open_folder(abandoned)
                try:
                    acquire_lock(lock, wait=False)
                    shutil.rmtree(abandoned, ignore_errors=True)
                finally:
                    os.close(lock)
        while True:
            with writing_to(parent):
                self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent.absolute()))
            with suppress(FileNotFoundError):  # another process removed it before it was locked
                lock = _open_folder(self.path)
                with suppress(OSError):
                    acquire_lock(lock)
                if self.path.exists():
                    break
                os.close(lock)
        self._finalizer = weakref.finalize(self, _remove_owned, self.path, lock, os.getpid())

    def cleanup(self) -> None:
        """Remove the folder; a second call does nothing."""
        self._finalizer()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *exc_info: object) -> None:
        self.cleanup()


def _open_folder(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY)


def _remove_owned(path: Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:  # not at the end of a fork: the owner still needs it
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


class SharedFile:
    """A file for this process and those that it starts. Without a name, it is gone with this one, however it ends.

    Attributes:
        path: To open it by, as long as this object lives in the process that made it. A pickle has the path alone.
    """

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("labkit")
            self.path = Path(f"/proc/{os.getpid()}/fd/{descriptor}")
            weakref.finalize(self, os.close, descriptor)
        else:  # not Linux: it has a name, and stays after a kill
            descriptor, name = tempfile.mkstemp(prefix="labkit-")
            os.close(descriptor)
            self.path = Path(name)
            weakref.finalize(self, _unlink_owned, self.path, os.getpid())


def _unlink_owned(path: Path, owner: int) -> None:
    if os.getpid() == owner:
        path.unlink(missing_ok=True)


@dataclass
class Folder:
    """What one folder holds, without what is hidden. Names are as the system gives them.

    prefix: Its path under the root, `""` or `"a/b/"`. broken: Names of what is neither a file nor a folder, such as a
    link to nothing. error: Why it cannot be listed, if so.
    """

    path: str
    prefix: str
    files: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    error: OSError | None = None


def walk(root: str | os.PathLike, *, recursive: bool = True) -> Iterator[Folder]:
    """Every folder from the root down, parents first. Follows links, but never in a circle.

    Raises:
        OSError: the root cannot be listed. A folder below it that cannot be listed has an `error` instead.
    """
    to_list: list[tuple[str, str, tuple]] = [(os.fspath(root), "", ())]
    while to_list:
        path, prefix, parents = to_list.pop()
        folder = Folder(path, prefix)
        try:
            status = os.stat(path)
            identity = status.st_dev, status.st_ino
            if identity in parents:  # a link to one of the folders above: all in it is listed already
                continue
            with os.scandir(path) as entries:
                for entry in entries:
                    if not is_hidden(entry.name):
                        _kind(folder, entry).append(entry.name)
        except OSError as error:
            if not parents:
                raise
            folder.error = error
        yield folder
        if recursive and folder.folders:
            above = (*parents, identity)
            to_list += [(os.path.join(path, name), f"{prefix}{name}/", above) for name in reversed(folder.folders)]


def _kind(folder: Folder, entry: os.DirEntry) -> list[str]:
    try:
        return folder.folders if entry.is_dir() else folder.files if entry.is_file() else folder.broken
    except OSError as error:  # of a link; where it is one to itself, there is nothing to lose, else listing it tells
        return folder.broken if error.errno == errno.ELOOP else folder.folders
