"""Where the ranks of one start meet: a folder of their own, which no other user can take, and no earlier run."""

import json
import os

import pytest

from labkit.watching import ranks

ENVIRONMENT = {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}


@pytest.fixture
def meeting(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return lambda: ranks._meeting_place(ENVIRONMENT)


def test_ranks_of_one_start_meet_in_one_folder_of_this_user(meeting):
    folder = meeting()
    assert folder == meeting()
    assert (folder.stat().st_mode & 0o777, folder.stat().st_uid) == (0o700, os.getuid())


@pytest.mark.parametrize("taken", ["open to others", "a link", "a file"])
def test_a_folder_that_others_may_write_to_is_not_used(meeting, tmp_path, taken):
    folder = meeting()
    folder.rmdir()
    if taken == "open to others":
        folder.mkdir(mode=0o777)
        folder.chmod(0o777)
    elif taken == "a link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.write_text("")
    assert meeting() is None


def test_what_an_earlier_run_left_is_not_read(meeting, monkeypatch):
    """A parent of the same number, started at another time, is another run."""
    folder = meeting()
    (folder / "1.json").write_text(json.dumps({}))
    monkeypatch.setattr("psutil.Process.create_time", lambda self: 1.0)
    assert meeting() != folder
