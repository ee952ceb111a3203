"""One walk over the folders of a data set, for all that look for images in them."""

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from labkit.core.names import is_hidden


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
            _list(folder)
        except OSError as error:
            if not parents:
                raise
            folder.error = error
        yield folder
        if recursive and folder.folders:
            above = (*parents, identity)
            to_list += [(os.path.join(path, name), f"{prefix}{name}/", above) for name in reversed(folder.folders)]


def _list(folder: Folder) -> None:
    with os.scandir(folder.path) as entries:
        for entry in entries:
            if not is_hidden(entry.name):
                _kind(folder, entry).append(entry.name)


def _kind(folder: Folder, entry: os.DirEntry) -> list[str]:
    try:
        return folder.folders if entry.is_dir() else folder.files if entry.is_file() else folder.broken
    except OSError as error:  # of a link; where it is one to itself, there is nothing to lose, else listing it tells
        return folder.broken if error.errno == errno.ELOOP else folder.folders
