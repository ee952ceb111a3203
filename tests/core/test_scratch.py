"""Scratch folders: removed by their process, or, when it was killed, by the next."""

import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading

import pytest

from labkit import course
from labkit.app.notebooks import Notebook, execute
from labkit.util import files as scratch

fcntl = pytest.importorskip("fcntl", reason="this system has no file locks")

CODE = """
import os, signal, sys
from labkit import course
kept = course.ScratchFolder(sys.argv[1])
(kept.path / "folder").mkdir()
(kept.path / "folder" / "file").touch()
"""


def run(code: str, folder: os.PathLike) -> int:
    return subprocess.run([sys.executable, "-c", CODE + code, folder], check=False).returncode


def test_it_is_beside_the_photos_and_goes(tmp_path, monkeypatch, n_open_files):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "home"))
    with course.ScratchFolder() as path:
        assert path.parent == course.photo_root("imagenet").parent
        (path / "a").write_bytes(b"a")
    one, other = course.ScratchFolder(), course.ScratchFolder()
    assert sorted(path.parent.iterdir()) == sorted([one.path, other.path])
    assert str(one.path) in repr(one)
    n_open = n_open_files()
    one.cleanup()
    one.cleanup()
    assert n_open_files() == n_open - 1
    assert list(path.parent.iterdir()) == [other.path]
    del other
    gc.collect()
    assert list(path.parent.iterdir()) == []


def test_the_end_of_its_process_removes_it_and_not_the_end_of_a_fork(tmp_path):
    assert run("assert os.listdir(sys.argv[1])", tmp_path) == 0
    assert list(tmp_path.iterdir()) == []
    fork = "os.fork() or sys.exit(); os.wait(); assert (kept.path / 'folder' / 'file').exists()"
    assert run(fork, tmp_path) == 0
    assert list(tmp_path.iterdir()) == []


def test_the_next_one_removes_what_a_sigkill_left(tmp_path):
    for _ in range(2):
        assert run("os.kill(os.getpid(), signal.SIGKILL)", tmp_path) == -signal.SIGKILL
        assert len(list(tmp_path.iterdir())) == 1  # the second has removed the first one's
    with course.ScratchFolder(tmp_path) as own:
        assert list(tmp_path.iterdir()) == [own]
        assert run("", tmp_path) == 0
        assert list(tmp_path.iterdir()) == [own], "a living process's folder was removed"


def test_only_its_own_kind_is_removed(tmp_path):
    elsewhere, place = tmp_path / "elsewhere", tmp_path / "place"
    for path in (elsewhere, place, place / "labkit-scratch-abcdefghi", place / "labkit-scratch-abcdefgh"):
        path.mkdir()
    (elsewhere / "kept").touch()
    (place / "labkit-scratch-aaaaaaaa").symlink_to(elsewhere, target_is_directory=True)
    (place / "labkit-scratch-bbbbbbbb").touch()
    course.ScratchFolder(place).cleanup()
    names = ["labkit-scratch-aaaaaaaa", "labkit-scratch-abcdefghi", "labkit-scratch-bbbbbbbb"]
    assert sorted(os.listdir(place)) == names
    assert os.listdir(elsewhere) == ["kept"]


def test_without_locks_nothing_of_others_is_removed(tmp_path, monkeypatch):
    (tmp_path / "labkit-scratch-abcdefgh").mkdir()

    def refused(*arguments):
        raise OSError("no locks here")

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", refused)
        with course.ScratchFolder(tmp_path) as path:
            assert path.is_dir()
    assert not path.exists()
    assert os.listdir(tmp_path) == ["labkit-scratch-abcdefgh"]


@pytest.mark.parametrize("when", ["before it is opened", "before it is locked"])
def test_a_folder_that_is_swept_before_it_is_held_is_made_again(tmp_path, monkeypatch, when):
    made, threads, real = [], [], tempfile.mkdtemp

    def swept(**arguments):
        made.append(real(**arguments))
        if len(made) == 1 and when == "before it is opened":
            os.rmdir(made[0])
        elif len(made) == 1:
            lock = os.open(made[0], os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            threads.append(threading.Timer(0.2, lambda: (os.rmdir(made[0]), os.close(lock))))
            threads[0].start()
        return made[-1]

    monkeypatch.setattr(scratch.tempfile, "mkdtemp", swept)
    with course.ScratchFolder(tmp_path) as path:
        for thread in threads:
            thread.join()
        assert (str(path), len(made)) == (made[-1], 2)
        assert path.is_dir()


def test_a_place_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        course.ScratchFolder(tmp_path / "file")


def test_what_a_kernel_leaves_goes_with_it(tmp_path, monkeypatch):
    """Also Jupyter's own file of how to reach the kernel."""
    import nbformat

    code = """
import pathlib, tempfile
left = pathlib.Path(tempfile.mkdtemp())
sorted(path.name for path in left.parent.iterdir() if path != left)
"""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    path = tmp_path / "00_leaves.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)]), path)
    run = execute(Notebook(path, "", ""), timeout_s=60)
    assert run.error == ""
    assert run.node.cells[0].outputs[0].data["text/plain"] == "['kernel.json']"
    assert list(temporary.iterdir()) == []
