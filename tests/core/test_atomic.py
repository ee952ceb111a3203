"""Files that are written whole or not at all."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.util.files import atomic_path, remove_leftovers, write_all_atomic, write_atomic

fcntl = pytest.importorskip("fcntl", reason="this system has no file locks")


@pytest.mark.parametrize("name", ["a.bin", "n" * 255])
def test_a_file_is_written_whole(tmp_path, name):
    target = tmp_path / "new" / "folder" / name
    write_atomic(target, b"one")
    write_atomic(target, b"two")
    assert target.read_bytes() == b"two"
    assert list(target.parent.iterdir()) == [target]


def test_several_files_are_written_all_or_none(tmp_path):
    (tmp_path / "a").write_bytes(b"before")
    (tmp_path / "no folder").touch()
    with pytest.raises(OSError, match="no folder"):
        write_all_atomic({tmp_path / "a": b"1", tmp_path / "new" / "b": b"2", tmp_path / "no folder" / "c": b"3"})
    assert (tmp_path / "a").read_bytes() == b"before"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "new", "no folder"]
    write_all_atomic({tmp_path / "a": b"1", tmp_path / "new" / "b": b"2"})
    assert [(tmp_path / name).read_bytes() for name in ("a", "new/b")] == [b"1", b"2"]


def test_nothing_is_left_of_a_file_that_failed(tmp_path):
    target = tmp_path / "a.bin"
    target.write_bytes(b"before")

    def fail_midway(partial: Path) -> None:
        partial.write_bytes(b"half")
        assert (target.read_bytes(), partial.parent) == (b"before", tmp_path)
        assert re.fullmatch(rf"\.{os.getpid()}-[0-9a-f]{{8}}\.partial", partial.name)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), atomic_path(target) as partial:
        fail_midway(partial)
    assert target.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [target]


WRITE_HALF = """
import os, signal, sys
from pathlib import Path
from labkit.util.files import atomic_path
with atomic_path(Path(sys.argv[1])) as partial:
    partial.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_killed_processes_were_writing_is_removed(tmp_path):
    target = tmp_path / "a.bin"
    for _ in range(2):
        assert subprocess.run([sys.executable, "-c", WRITE_HALF, target], check=False).returncode == -9
    assert len(list(tmp_path.iterdir())) == 1  # the second killed one has removed what the first left
    with atomic_path(tmp_path / "elsewhere") as living:  # its first write here, and this process lives
        assert list(tmp_path.iterdir()) == [living]
        again = subprocess.run([sys.executable, "-c", WRITE_HALF.replace("SIGKILL", "SIGCONT"), target], check=False)
        assert (again.returncode, living.exists(), target.read_bytes()) == (0, True, b"half")


def test_a_file_that_is_removed_while_it_is_claimed_is_claimed_again(tmp_path, monkeypatch):
    lock, removed = fcntl.flock, []

    def remove_first(file, how):
        lock(file, how)
        if not removed:
            removed.append(os.unlink(file.name))

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with atomic_path(tmp_path / "a.bin") as partial:
        assert partial.exists()
        assert removed
        with pytest.raises(BlockingIOError), open(partial, "ab") as file:
            lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("n_bytes", [0, 1000])
def test_where_there_is_no_room_the_file_is_named(tmp_path, n_bytes):
    code = f"""
import resource, sys
from pathlib import Path
from labkit.util.files import write_atomic
resource.setrlimit(resource.RLIMIT_FSIZE, ({n_bytes}, {n_bytes}))
try:
    write_atomic(Path(sys.argv[1]), b"x" * 10_000)
except OSError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", code, tmp_path / "a.bin"], capture_output=True, text=True, check=True)
    assert said.stdout == f"[Errno 27] File too large: '{tmp_path / 'a.bin'}'\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "about", "named"),
    [
        (errno.ENOSPC, None, "a.bin"),
        (errno.EIO, "partial", "a.bin"),
        (errno.EIO, "other", "other"),
        (errno.EIO, None, None),
    ],
)
def test_an_error_of_the_file_that_is_written_names_the_one_that_was_wanted(
    tmp_path, monkeypatch, number, about, named
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match="why") as caught, atomic_path(Path("a.bin")) as partial:
        raise OSError(number, "why", str(partial) if about == "partial" else about)
    assert (caught.value.errno, caught.value.filename) == (number, named)


def test_leftovers_are_removed_and_nothing_else(tmp_path):
    left, others = tmp_path / ".1-00000000.partial", {".1-00000000.partial.csv", "1-00000000.partial", ".1-0.partial"}
    for name in others:
        (tmp_path / name).touch()
    left.touch()
    with open(left, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        remove_leftovers(tmp_path)
        assert left.exists()
    remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == others
    remove_leftovers(tmp_path / "missing")
    write_atomic(tmp_path / "a", b"")  # the first write of this process to the folder
    left.touch()
    write_atomic(tmp_path / "a", b"")
    assert left.exists(), "each write lists the folder"


def _refuse(*_):
    raise OSError(errno.ENOLCK, "no locks here")


def test_without_locks_a_file_is_written_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", _refuse)
    with atomic_path(tmp_path / "a") as partial:
        assert partial.stat().st_size == 0  # claimed before it is written
        partial.write_bytes(b"whole")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"whole"}


def test_writers_at_once_do_not_meet(tmp_path):
    target = tmp_path / "a.bin"
    with atomic_path(target) as one, atomic_path(target) as two:
        one.write_bytes(b"1" * 1000)
        two.write_bytes(b"2" * 1000)
        assert one != two
    assert target.read_bytes() == b"1" * 1000  # the outer block ends last
    assert list(tmp_path.iterdir()) == [target]
