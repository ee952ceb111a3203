"""Where tests find the repository and its scripts, and what a folder holds."""

import io
import os
import runpy
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

REPO = Path(__file__).resolve().parents[1]
SCRIPTS = REPO / "data_scripts"


def run_script(name: str, *arguments: object):
    """Run a script of data_scripts/ in this process."""
    return invoke(runpy.run_path(str(SCRIPTS / f"{name}.py"))["main"], arguments)


class _Tee(io.BytesIO):
    """Bytes that a second buffer gets, too."""

    def __init__(self, other: io.BytesIO):
        super().__init__()
        self._other = other

    def write(self, data):
        self._other.write(data)
        return super().write(data)


def invoke(program, words, env=None):
    """Run a command line in this process: its `exit_code` and `exception`, and what it prints."""
    both = io.BytesIO()
    files = [io.TextIOWrapper(_Tee(both), "utf-8", errors="surrogateescape", write_through=True) for _ in range(2)]
    exit_code, exception = 0, None
    with patch.dict(os.environ, env or {}), redirect_stdout(files[0]), redirect_stderr(files[1]):
        try:
            program([*map(str, words)])
        except SystemExit as end:
            exit_code = end.code or 0
        except Exception as error:
            exit_code, exception = 1, error
    out, err, output = (file.getvalue().decode(errors="replace") for file in (*(file.buffer for file in files), both))
    return SimpleNamespace(exit_code=exit_code, exception=exception, stdout=out, stderr=err, output=output)


def contents(root: Path) -> dict[str, bytes]:
    """Every file under `root`, hidden ones included."""
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def times(root: Path) -> dict[str, tuple[int, int]]:
    """When each of them was written, and its inode: clocks of file systems are coarse."""
    found = {path.relative_to(root).as_posix(): path.stat() for path in root.rglob("*") if path.is_file()}
    return {name: (status.st_mtime_ns, status.st_ino) for name, status in found.items()}
