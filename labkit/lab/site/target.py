"""The folder that a site goes to: replaced whole, and only if it is empty or holds an earlier site."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from labkit.core import ScratchFolder, foreign_names, read_record, write_record

RECORD = ".labkit-site.json"  # what marks a folder as ours
_ABOUT = {"made by": "labkit site"}


def check_target(folder: Path) -> None:
    """Raise ValueError where `folder` is a file, or holds something else than an earlier site."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: name a folder for the site, a new one or one that a site is in")
    foreign = foreign_names(folder, lambda name: False)
    if foreign and read_record(folder / RECORD) != _ABOUT:
        raise ValueError(
            f"{folder} is not empty and holds no site, but {foreign[0]!r}: name another folder, or empty it"
        )


@contextmanager
def replaced_whole(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder`: its `html` takes the place of `folder` at the end, and nothing on an error.

    Raises:
        ValueError: `folder` holds something else than an earlier site.
        OSError: it cannot be written to, or replaced.
    """
    folder = folder.resolve()
    check_target(folder)
    with ScratchFolder(folder.parent) as scratch:
        yield scratch
        write_record(scratch / "html" / RECORD, _ABOUT)
        check_target(folder)  # a build takes long enough for somebody to put a file there
        if folder.exists():
            os.rename(folder, scratch / "before")
        try:
            os.rename(scratch / "html", folder)
        except OSError:
            if (scratch / "before").exists():
                os.rename(scratch / "before", folder)
            raise
