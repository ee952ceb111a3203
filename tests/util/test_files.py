"""Files and folders: whole or not there, one holder of a lock, one job in a folder, and nothing that stays behind."""

import errno
import fcntl
import gc
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import labkit as lk
from labkit import course
from labkit.util import files
from labkit.util.files import atomic_path, claim_folder, file_lock, write_all_atomic, write_atomic, write_record
from tests.children import end_of_fork, in_children
from tests.paths import contents


def kill_within(claim, place: Path) -> None:
    """Die of SIGKILL within a claim of a place, with half of a file where it gives a path."""
    with claim(place) as path:
        if path is not None:
            (path / "file" if path.is_dir() else path).write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)


def refuse_locks(*_) -> None:
    raise OSError(errno.ENOLCK, "no locks here")


@pytest.mark.parametrize("name", ["a.bin", "n" * 255])
def test_a_file_is_written_whole(tmp_path, name):
    target = tmp_path / "new" / "folder" / name
    write_atomic(target, b"one")
    write_atomic(target, b"two")
    assert contents(tmp_path) == {f"new/folder/{name}": b"two"}


def test_several_files_are_written_all_or_none(tmp_path):
    (tmp_path / "a").write_bytes(b"before")
    (tmp_path / "no folder").touch()
    with pytest.raises(OSError, match="no folder"):
        write_all_atomic({tmp_path / "a": b"1", tmp_path / "new" / "b": b"2", tmp_path / "no folder" / "c": b"3"})
    assert contents(tmp_path) == {"a": b"before", "no folder": b""}
    write_all_atomic({tmp_path / "a": b"1", tmp_path / "new" / "b": b"2"})
    assert contents(tmp_path) == {"a": b"1", "new/b": b"2", "no folder": b""}


def test_nothing_is_left_of_a_file_that_failed(tmp_path):
    target = tmp_path / "a.bin"
    target.write_bytes(b"before")

    def fail_midway(partial_path: Path) -> None:
        partial_path.write_bytes(b"half")
        assert contents(tmp_path) == {"a.bin": b"before", partial_path.name: b"half"}
        assert re.fullmatch(rf"\.{os.getpid()}-[0-9a-f]{{8}}\.partial", partial_path.name)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), atomic_path(target) as partial_path:
        fail_midway(partial_path)
    assert contents(tmp_path) == {"a.bin": b"before"}


def test_what_killed_processes_were_writing_is_removed_by_the_next(tmp_path):
    target = tmp_path / "a.bin"
    for _ in range(2):
        assert end_of_fork(kill_within, atomic_path, target) == -signal.SIGKILL
        assert list(contents(tmp_path).values()) == [b"half"]
    with atomic_path(tmp_path / "elsewhere") as living:  # its first write here, and this process lives
        assert list(tmp_path.iterdir()) == [living]
        code = (
            f"from pathlib import Path; from labkit.util.files import *; write_atomic(Path({str(target)!r}), b'whole')"
        )
        subprocess.run([sys.executable, "-c", code], check=True)
        assert (living.exists(), target.read_bytes()) == (True, b"whole")


def test_leftovers_are_removed_and_nothing_else(tmp_path):
    left, others = tmp_path / ".1-00000000.partial", {".1-00000000.partial.csv", "1-00000000.partial", ".1-0.partial"}
    for name in (left.name, *others):
        (tmp_path / name).touch()
    with open(left, "ab") as file:  # of a writer that lives, on whatever machine
        fcntl.flock(file, fcntl.LOCK_EX)
        files.remove_leftovers(tmp_path)
        assert left.exists()
    files.remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == others
    files.remove_leftovers(tmp_path / "missing")
    write_atomic(tmp_path / "a", b"")  # the first write of this process to the folder
    left.touch()
    write_atomic(tmp_path / "a", b"")
    assert left.exists(), "each write lists the folder"


def test_a_file_that_is_removed_while_it_is_claimed_is_claimed_again(tmp_path, monkeypatch):
    lock, removed = fcntl.flock, []

    def remove_first(file, how):
        lock(file, how)
        if not removed:
            removed.append(os.unlink(file.name))

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with atomic_path(tmp_path / "a.bin") as partial_path:
        assert (partial_path.exists(), len(removed)) == (True, 1)
        with pytest.raises(BlockingIOError), open(partial_path, "ab") as file:
            lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def write_with_room_for(n_bytes: int, target: Path) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, n_bytes))
    with pytest.raises(OSError, match="too large") as caught:
        write_atomic(target, b"x" * 10_000)
    return str(caught.value)


def test_where_there_is_no_room_the_file_is_named(tmp_path):
    target = tmp_path / "a.bin"
    said = in_children("fork", write_with_room_for, (0, target), (1000, target))
    assert said == [f"[Errno 27] File too large: '{target}'"] * 2
    assert contents(tmp_path) == {}


@pytest.mark.parametrize(
    ("number", "about", "named"),
    [
        (errno.ENOSPC, None, "a.bin"),
        (errno.EIO, "partial", "a.bin"),
        (errno.EIO, "other", "other"),
        (errno.EIO, None, None),
    ],
)
def test_an_error_of_writing_names_the_file_that_was_wanted(tmp_path, monkeypatch, number, about, named):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match="why") as caught, atomic_path(Path("a.bin")) as partial_path:
        raise OSError(number, "why", str(partial_path) if about == "partial" else about)
    assert (caught.value.errno, caught.value.filename) == (number, named)


def test_writers_at_once_do_not_meet(tmp_path):
    target = tmp_path / "a.bin"
    with atomic_path(target) as one, atomic_path(target) as two:
        one.write_bytes(b"1" * 1000)
        two.write_bytes(b"2" * 1000)
        assert one != two
    assert contents(tmp_path) == {"a.bin": b"1" * 1000}  # the outer block ends last


def test_a_lock_has_one_holder_at_a_time(tmp_path):
    holders, most = [], []

    def hold(_):
        with file_lock(tmp_path / "new" / "lock"):
            holders.append(1)
            time.sleep(0.0005)
            most.append(len(holders))
            holders.pop()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(hold, range(200)))
    assert most == [1] * 200
    assert os.listdir(tmp_path / "new") == []


def test_neither_a_killed_process_nor_a_block_that_fails_holds_a_lock(tmp_path):
    assert end_of_fork(kill_within, file_lock, tmp_path / "lock") == -signal.SIGKILL
    assert os.listdir(tmp_path) == ["lock"]
    for _ in range(2):
        with pytest.raises(KeyError), file_lock(tmp_path / "lock"):
            raise KeyError
        assert os.listdir(tmp_path) == []


RECORD = {"seed": 0, "kind": "day"}


def claim(folder: Path, record: dict = RECORD, name: str = "settings.json", **options) -> dict:
    return claim_folder(folder, name, record, what="things", **options)


@pytest.mark.parametrize("name", ["settings.json", "unfinished/settings.json"])
def test_a_folder_is_claimed_and_taken_up_by_the_same_job(tmp_path, name):
    killed_before_its_record = tmp_path / "killed" / name
    killed_before_its_record.parent.mkdir(parents=True)
    (tmp_path / "killed" / ".1-0123abcd.partial").write_bytes(b"half")
    for folder in (tmp_path / "new" / "set", tmp_path / "killed"):
        for _ in range(2):
            assert claim(folder, name=name) == RECORD
        assert json.loads((folder / name).read_text()) == RECORD


def test_progress_of_the_same_job_is_returned(tmp_path):
    record = {"settings": RECORD, "done": []}
    claim(tmp_path, record, key="settings")
    write_record(tmp_path / "settings.json", {**record, "done": ["a"]}, indent=1)
    assert claim(tmp_path, record, key="settings")["done"] == ["a"]


def test_another_process_claims_the_folder_meanwhile(tmp_path, monkeypatch):
    def list_before_the_other_writes(folder):
        write_record(folder / "settings.json", RECORD)
        return []

    monkeypatch.setattr(os, "listdir", list_before_the_other_writes)
    assert claim(tmp_path) == RECORD


def assert_refused(folder: Path, said: str, **options) -> None:
    before = contents(folder)
    with pytest.raises(ValueError, match=said) as failure:
        claim(folder, **options)
    assert str(folder) in str(failure.value)
    assert "choose " in str(failure.value).rpartition(": ")[2]
    assert contents(folder) == before


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("important")
    assert_refused(tmp_path, "holds no things, but 'thesis.txt'")


@pytest.mark.parametrize(
    ("found", "listed"),
    [
        ({"seed": 1, "kind": "night"}, r"\(seed 1, not 0, kind 'night', not 'day'\)"),
        ({**RECORD, "extra": True}, r"\(extra True, not None\)"),
    ],
)
def test_another_job_is_refused_by_what_differs(tmp_path, found, listed):
    write_record(tmp_path / "settings.json", found)
    assert_refused(tmp_path, f"holds other things {listed}")


@pytest.mark.parametrize("text", [b"{", b"[]", b"{}", b"\xff{}", b'{"settings": 1}', b"[" * 100_000])
def test_a_damaged_record_is_refused(tmp_path, text):
    (tmp_path / "settings.json").write_bytes(text)
    record = {"settings": RECORD}
    assert_refused(tmp_path, r"settings\.json is damaged, or not labkit's", record=record, key="settings")
    assert not files.holds_record(tmp_path / "settings.json", record)


def test_records_are_compared_whole(tmp_path):
    path = tmp_path / "deep" / "record.json"
    assert files.read_record(path) is None
    assert not files.holds_record(path, RECORD)
    write_record(path, RECORD)
    assert [files.holds_record(path, record) for record in (RECORD, {"seed": 0})] == [True, False]
    with pytest.raises(ValueError, match=r"^x is damaged, .*KeyError: 'rows'"), files.damage_named(Path("x")):
        {}["rows"]


WITH_SCRATCH = """
import os, signal, sys
from labkit import course
kept = course.ScratchFolder(sys.argv[1])
(kept.path / "folder").mkdir()
(kept.path / "folder" / "file").touch()
"""


def end_of(code: str, folder: Path) -> int:
    return subprocess.run([sys.executable, "-c", WITH_SCRATCH + code, folder], check=False).returncode


def test_a_scratch_folder_is_beside_the_photos_and_goes(tmp_path, monkeypatch, n_open_files):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "home"))
    with course.ScratchFolder() as path:
        assert path.parent == course.photo_root("imagenet").parent
        (path / "a").write_bytes(b"a")
    one, other = course.ScratchFolder(), course.ScratchFolder()
    assert sorted(path.parent.iterdir()) == sorted([one.path, other.path])
    n_open = n_open_files()
    one.cleanup()
    one.cleanup()
    assert n_open_files() == n_open - 1
    assert list(path.parent.iterdir()) == [other.path]
    del other
    gc.collect()
    assert list(path.parent.iterdir()) == []


def test_a_home_that_cannot_be_written_to_is_told_and_the_remedy_works(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    calls = {
        "photos": lambda root: lk.make_photos(course.photo_root("imagenet"), 1, progress=False),
        "depth": lambda root: course.make_depth(course.photo_root("camera"), 1, num_workers=1, progress=False),
        "scratch": lambda root: course.ScratchFolder().cleanup(),
        "elsewhere": lambda root: lk.make_photos(root / "photos", 1, progress=False),
    }
    for name, call in calls.items():
        monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "file" / "home"))
        remedy = "choose another folder" if name == "elsewhere" else "home cannot be written to .*: set LABKIT_HOME to"
        with pytest.raises(lk.LabkitError, match=rf"{tmp_path}/file.*{remedy}"):
            call(tmp_path / "file")
        monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "home"))
        call(tmp_path)


def test_the_end_of_its_process_removes_it_and_not_the_end_of_a_fork(tmp_path):
    fork = "os.fork() or sys.exit(); os.wait(); assert (kept.path / 'folder' / 'file').exists()"
    assert end_of(fork, tmp_path) == 0
    assert list(tmp_path.iterdir()) == []


def test_the_next_one_removes_what_a_sigkill_left(tmp_path):
    for _ in range(2):
        assert end_of_fork(kill_within, course.ScratchFolder, tmp_path) == -signal.SIGKILL
        assert len(list(tmp_path.iterdir())) == 1  # the second has removed the first one's
    with course.ScratchFolder(tmp_path) as own:
        assert list(tmp_path.iterdir()) == [own]
        course.ScratchFolder(tmp_path).cleanup()
        assert list(tmp_path.iterdir()) == [own], "a folder in use was removed"


def test_only_its_own_kind_is_removed(tmp_path):
    elsewhere, place = tmp_path / "elsewhere", tmp_path / "place"
    for path in (elsewhere, place, place / "labkit-scratch-abcdefghi", place / "labkit-scratch-abcdefgh"):
        path.mkdir()
    (elsewhere / "kept").touch()
    (place / "labkit-scratch-aaaaaaaa").symlink_to(elsewhere, target_is_directory=True)
    (place / "labkit-scratch-bbbbbbbb").touch()
    course.ScratchFolder(place).cleanup()
    kept = ["labkit-scratch-aaaaaaaa", "labkit-scratch-abcdefghi", "labkit-scratch-bbbbbbbb"]
    assert sorted(os.listdir(place)) == kept
    assert os.listdir(elsewhere) == ["kept"]


def test_without_locks_files_are_written_and_none_of_others_is_removed(tmp_path, monkeypatch):
    (tmp_path / "labkit-scratch-abcdefgh").mkdir()
    (tmp_path / ".1-0123abcd.partial").touch()
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", refuse_locks)
        with course.ScratchFolder(tmp_path) as path, atomic_path(tmp_path / "a") as partial_path:
            assert path.is_dir()
            assert partial_path.stat().st_size == 0  # claimed before it is written
            partial_path.write_bytes(b"whole")
    assert sorted(os.listdir(tmp_path)) == [".1-0123abcd.partial", "a", "labkit-scratch-abcdefgh"]


@pytest.mark.parametrize("when", ["before it is opened", "before it is locked"])
def test_a_folder_that_is_swept_before_it_is_held_is_made_again(tmp_path, monkeypatch, when):
    made, threads, make = [], [], tempfile.mkdtemp

    def sweep(lock: int) -> None:
        os.rmdir(made[0])
        os.close(lock)

    def swept(**arguments) -> str:
        made.append(make(**arguments))
        if len(made) == 1 and when == "before it is opened":
            os.rmdir(made[0])
        elif len(made) == 1:
            lock = os.open(made[0], os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            threads.append(threading.Timer(0.2, sweep, [lock]))
            threads[0].start()
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", swept)
    with course.ScratchFolder(tmp_path) as path:
        for thread in threads:
            thread.join()
        assert (str(path), len(made)) == (made[-1], 2)
        assert path.is_dir()
