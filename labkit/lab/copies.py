"""Copies of the notebooks and scripts, for readers who installed a wheel: kept up to date, never over their edits."""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from labkit.core import NOTEBOOK_FOLDER, file_lock, read_record, write_atomic, write_record

COPIES = Path("labkit-notebooks")
SCRIPTS = "data_scripts"  # beside the notebooks, which name it

_RECORD = ".labkit-copies.json"  # name of a copy -> SHA-256 of what labkit wrote there


def update_copies(say: Callable[[str], None], notebooks: Path = NOTEBOOK_FOLDER) -> Path:
    """Copy the wheel's notebooks and scripts to `./labkit-notebooks`, or to the current folder if that is what it is.

    Missing copies are made, and those that the reader has not edited are replaced by newer versions. An edited copy
    stays; its newer version is put beside it as `new-NAME`, until the reader removes that.

    Args:
        say: Called with a line for each edited copy that has a newer version, and one if anything was copied.
        notebooks: The wheel's folder of notebooks, which has the scripts' beside it.

    Returns:
        The folder of the copies, absolute.

    Raises:
        OSError: the folder cannot be written to; the message names it and the remedy.
    """
    folder = (Path() if Path(_RECORD).is_file() else COPIES).absolute()
    try:
        with file_lock(folder / f"{_RECORD}.lock"):
            copies = _Copies(folder)
            copies.update(_sources(notebooks), say)
    except OSError as error:
        raise OSError(f"{folder} cannot hold the notebooks' copies ({error}): run labkit in another folder") from error
    if copies.n_written:
        say(f"{folder}: {copies.n_written} files copied")
    return folder


def _sources(notebooks: Path) -> dict[str, Path]:
    """Name of each copy -> the wheel's file."""
    found = {path.name: path for path in sorted(notebooks.iterdir()) if path.is_file()}
    scripts = sorted(notebooks.with_name(SCRIPTS).glob("*.py"))  # pip puts a __pycache__ beside them
    return found | {f"{SCRIPTS}/{path.name}": path for path in scripts}


class _Copies:
    """The copies in a folder, and the record of what labkit wrote there."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.n_written = 0
        self.recorded: dict[str, str] = {}
        with suppress(ValueError):  # without its record, every copy that differs counts as edited
            self.recorded = read_record(folder / _RECORD) or {}

    def update(self, sources: dict[str, Path], say: Callable[[str], None]) -> None:
        for name, source in sources.items():
            if (newer := self._update_one(name, source)) is not None:
                say(f"{self.folder / name} has your edits and stays as it is; the newer version is {newer}")
        for name in self.recorded.keys() - sources.keys() - {_beside(name) for name in sources}:
            self._remove_unedited(name)  # the wheel no longer has it
        write_record(self.folder / _RECORD, self.recorded, indent=1)

    def _update_one(self, name: str, source: Path) -> Path | None:
        """The newer version's path if the reader's edits keep it from its place, and the reader has not removed it."""
        data, beside = source.read_bytes(), _beside(name)
        if self._replace_unedited(name, data):
            self._remove_unedited(beside)
            return None
        if self.recorded.get(name) == _digest(data):  # edited, and from this version
            return None
        if self.recorded.get(beside) == _digest(data) and not (self.folder / beside).exists():
            return None
        return self.folder / beside if self._replace_unedited(beside, data) else source

    def _replace_unedited(self, name: str, data: bytes) -> bool:
        """Whether the copy holds `data` now; one that the reader has edited stays."""
        path, wanted = self.folder / name, _digest(data)
        found = _digest(path.read_bytes()) if path.exists() else None
        if found not in (None, wanted, self.recorded.get(name)):
            return False
        if found != wanted:
            write_atomic(path, data)
            self.n_written += 1
        self.recorded[name] = wanted
        return True

    def _remove_unedited(self, name: str) -> None:
        path = self.folder / name
        if path.is_file() and _digest(path.read_bytes()) == self.recorded.get(name):
            path.unlink()
        self.recorded.pop(name, None)


def _beside(name: str) -> str:
    """The name of a newer version: not one of a numbered notebook, so that a tour does not run it."""
    return str(Path(name).with_name(f"new-{Path(name).name}").as_posix())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
