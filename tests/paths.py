"""Where tests find the repository and its scripts, and what a folder holds."""

import runpy
from pathlib import Path

from typer.testing import CliRunner

REPO = Path(__file__).resolve().parents[1]
SCRIPTS = REPO / "data_scripts"


def run_script(name: str, *arguments: object):
    """Run a script of data_scripts/ in this process."""
    return CliRunner().invoke(runpy.run_path(str(SCRIPTS / f"{name}.py"))["main"], list(map(str, arguments)))


def contents(root: Path) -> dict[str, bytes]:
    """Every file under `root`, hidden ones included."""
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def times(root: Path) -> dict[str, tuple[int, int]]:
    """When each of them was written, and its inode: clocks of file systems are coarse."""
    found = {path.relative_to(root).as_posix(): path.stat() for path in root.rglob("*") if path.is_file()}
    return {name: (status.st_mtime_ns, status.st_ino) for name, status in found.items()}
