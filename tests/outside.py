"""What a run of pytest changes outside its own folders, which fails it: the clone, labkit's folder, the home, TMPDIR.

A plugin, not a part of tests/conftest.py, which pytest loads only for tests: the notebooks are looked at, too.
"""

import multiprocessing
import multiprocessing.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from unittest import mock

import nbval.plugin
import pytest
from nbval.kernel import RunningKernel

from labkit.util.machine import labkit_home
from tests import forked
from tests.paths import REPO

# Python and tools keep these beside what they read; git is what its user does meanwhile.
_CACHES = {
    "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".git", ".import_linter_cache",
    "labkit_images.egg-info",
}  # fmt: skip
# Of the home only the names: what is in there belongs to programs that run beside the tests.
_IN_HOME = (".", ".cache", ".config", ".local", ".local/share", ".local/state")
# Libraries fill these once for a user; labkit's own folder is looked at with all that is in it.
_OF_LIBRARIES = {"matplotlib", "fontconfig", ".ray", "labkit"}

# What processes that tests kill leave in the temporary folder of the run, and what torchrun always does.
_OF_THE_KILLED = ("pymp-", "torchelastic_")

_before = pytest.StashKey[dict[Path, tuple[int, ...]]]()
_temporary_folder = pytest.StashKey[Path]()
_changed = pytest.StashKey[list[str]]()
_server = pytest.StashKey[subprocess.Popen]()


class _Kernel(RunningKernel):
    """Of a notebook: nbval kills it, so its temporary folders lie in one that is removed."""

    def __init__(self, kernel_name, *arguments, **options):
        self._temporary = tempfile.mkdtemp(prefix="kernel-")
        with mock.patch.dict(os.environ, TMPDIR=self._temporary):
            super().__init__(forked.KERNEL if forked.ADDRESS in os.environ else kernel_name, *arguments, **options)

    def stop(self):
        super().stop()
        shutil.rmtree(self._temporary, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)  # tests/turns.py needs the folder
def pytest_configure(config):
    nbval.plugin.RunningKernel = _Kernel
    if not hasattr(config, "workerinput"):  # pytest-xdist's processes inherit all of this
        _give_folders(config)
        config.stash[_before] = _look()
    # Made once for a process: within a test that sets `tempfile.tempdir`, it would go with that test, and no later one
    # could start a fork server.
    multiprocessing.util.get_temp_dir()


def _give_folders(config):
    """A temporary folder for all that tests start, removed in the end; pytest's own lie beside it."""
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    compiled = config.cache.mkdir("torchinductor") if hasattr(config, "cache") else tempfile.gettempdir()
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled))  # compiled code outlives a run
    config.stash[_temporary_folder] = folder = Path(tempfile.mkdtemp(prefix="labkit-tests-"))
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    jupyter = folder / "jupyter"  # kernels keep a history, and signatures of notebooks
    jupyter.mkdir()
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        os.environ[name] = str(jupyter / name)
    config.stash[_server] = forked.start(jupyter / "JUPYTER_DATA_DIR")


@pytest.hookimpl(wrapper=True, trylast=True)  # when the processes of pytest-xdist have ended
def pytest_sessionfinish(session):
    """Fail a run that has changed something, and remove what it left in its temporary folder."""
    result = yield
    if (before := session.config.stash.get(_before, None)) is not None:
        folder = session.config.stash[_temporary_folder]
        session.config.stash[_server].kill()
        session.config.stash[_server].wait()
        own = {Path(multiprocessing.current_process()._config.get("tempdir") or "none").name, "jupyter"}
        left = sorted(path.name for path in folder.iterdir() if path.name not in own)
        left = [name for name in left if not name.startswith(_OF_THE_KILLED)]
        session.config.stash[_changed] = [*_differences(before, _look()), *(f"new: {name} in TMPDIR" for name in left)]
        if session.config.stash[_changed] and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        # At exit, after `multiprocessing` has removed its own folder in it.
        multiprocessing.util.Finalize(None, shutil.rmtree, [folder], {"ignore_errors": True}, exitpriority=-200)
    return result


def pytest_terminal_summary(terminalreporter, config):
    if changed := config.stash.get(_changed, None):
        terminalreporter.section("changed outside of pytest's folders", red=True)
        terminalreporter.line("The run failed, since tests write into folders of their own (tmp_path) alone:")
        for line in changed:
            terminalreporter.line(line)


def _look() -> dict[Path, tuple[int, ...]]:
    """What is there by now: size and modification time of files that are ours, and names of what others own."""
    found = dict(_files(REPO))
    with suppress(OSError):  # of a user without a home
        found |= _files(labkit_home())
    with suppress(RuntimeError):
        for folder in (Path.home() / name for name in _IN_HOME):
            with suppress(OSError):
                found |= {folder / name: () for name in os.listdir(folder) if name not in _OF_LIBRARIES}
    return found


def _files(folder: Path) -> Iterator[tuple[Path, tuple[int, ...]]]:
    """Folders, without what they hold, and files below one; not caches, nor virtual environments."""
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            path = Path(entry.path)
            if entry.name in _CACHES or (path / "pyvenv.cfg").exists():
                continue
            if entry.is_dir(follow_symlinks=False):
                yield path, ()
                yield from _files(path)
            else:
                status = entry.stat(follow_symlinks=False)
                yield path, (status.st_size, status.st_mtime_ns)


def _differences(before: dict[Path, tuple[int, ...]], after: dict[Path, tuple[int, ...]]) -> list[str]:
    """One line for each path that is new, changed or gone; of a new folder, the topmost alone."""
    new = {path for path in after.keys() - before.keys() if not _is_of_a_photo_set(path)}
    tops = {path for path in new if path.parent not in new}
    changed = {path for path in after.keys() & before.keys() if after[path] != before[path]}
    gone = {path for path in before.keys() - after.keys() if path.parent in after or path.parent not in before}
    kinds = {"new": tops, "changed": changed, "gone": gone}
    return [f"{kind}: {path}" for kind, paths in kinds.items() for path in sorted(paths)]


def _is_of_a_photo_set(path: Path) -> bool:
    """A notebook makes the photos that it is the first to need, and they stay for later runs; none of them changes.

    So do the files that peers make of photos, which are kept under the same folder.
    """
    with suppress(OSError):
        kept = [labkit_home() / name for name in ("photos", "peers")]
        return path == labkit_home() or any(path == folder or folder in path.parents for folder in kept)
    return False
