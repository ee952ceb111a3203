"""Resume a job where an earlier run stopped: its folder holds a JSON record of what was asked for.

A run claims the folder with `claim_folder`. The first run writes the record; a run of the same job goes on from what
is there; any other job is refused. Files are written with `write_atomic`, so a file that has its name is whole.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from labkit.core.atomic import write_atomic

REMEDY = "choose another folder, or remove this one"


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
    path, own_name = folder / record_name, Path(record_name).parts[0]
    # Listed before the record is read: another process that runs the same job may write it in between.
    foreign = foreign_names(folder, lambda name: name == own_name)
    found = read_record(path)
    if found is None:
        if foreign:
            raise ValueError(f"{folder} is not empty and holds no {what}, but {foreign[0]!r}: {REMEDY}")
        write_record(path, record)
        return record
    with damage_named(path):
        check_same_job(folder, found if key is None else found[key], record if key is None else record[key], what=what)
    return found


def check_same_job(
    target: object, found: dict, asked: dict, *, what: str, remedy: str = REMEDY, error: type[Exception] = ValueError
) -> None:
    """Raise `error` where the record that made `target` is not the one asked for; it lists the differing entries."""
    if found != asked:
        names = [name for name in {**asked, **found} if found.get(name) != asked.get(name)]
        listed = ", ".join(f"{name} {found.get(name)!r}, not {asked.get(name)!r}" for name in names)
        raise error(f"{target} holds other {what} ({listed}): {remedy}")


def check_count(folder: Path, n_found: int, n_asked: int, *, what: str) -> None:
    """Raise ValueError where a folder holds more items than asked for: a job adds items and never removes one."""
    if n_found > n_asked:
        raise ValueError(f"{folder} holds {n_found} {what}, more than {n_asked}: {REMEDY}")


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
        raise ValueError(f"{path} is damaged, or not labkit's ({type(error).__name__}: {error}): {REMEDY}") from error
