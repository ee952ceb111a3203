"""Copies of a wheel's notebooks: up to date where the reader has not edited them, and never over edits."""

import json
import subprocess
import sys
from contextlib import suppress

import pytest

from labkit.app import notebooks as copies
from labkit.util.files import file_lock
from tests.paths import contents

NOTEBOOK, SCRIPT = "00_measure.ipynb", "data_scripts/make_photos.py"


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """The folders of a wheel; the current folder is an empty one."""
    root = tmp_path / "wheel"
    _write(root, {"notebooks/00_measure.ipynb": "v1", "notebooks/11_ladder.png": "png", SCRIPT: "script v1"})
    _write(root, {"data_scripts/__pycache__/make_photos.pyc": "compiled"})
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return root


def _write(root, texts):
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def update(wheel):
    """Lines that are said, but for the number of copies; and what the folder holds, but for the record."""
    lines = []
    folder = copies.update_copies(lines.append, wheel / "notebooks")
    held = {name: data.decode() for name, data in contents(folder).items() if not name.startswith(".")}
    return [line for line in lines if not line.endswith("copied")], held


FIRST = {NOTEBOOK: "v1", "11_ladder.png": "png", SCRIPT: "script v1"}


def test_copies_are_made_once_and_made_again_where_they_are_missing(wheel, tmp_path):
    assert update(wheel) == ([], FIRST)
    before = (tmp_path / "here" / copies.COPIES / NOTEBOOK).stat()
    (copies.COPIES / SCRIPT).unlink()
    lines = []
    assert copies.update_copies(lines.append, wheel / "notebooks") == tmp_path / "here" / "labkit-notebooks"
    assert [line for line in lines if ": 1 files copied" in line] == lines != []
    assert (copies.COPIES / NOTEBOOK).stat() == before
    assert update(wheel) == ([], FIRST)


def test_a_newer_version_replaces_a_copy_that_is_not_edited(wheel):
    update(wheel)
    _write(wheel, {f"notebooks/{NOTEBOOK}": "v2", SCRIPT: "script v2"})
    assert update(wheel) == ([], {**FIRST, NOTEBOOK: "v2", SCRIPT: "script v2"})


@pytest.mark.parametrize(
    ("name", "beside"), [(NOTEBOOK, f"new-{NOTEBOOK}"), (SCRIPT, "data_scripts/new-make_photos.py")]
)
def test_an_edited_copy_stays_and_its_newer_version_is_named_until_the_reader_removes_it(wheel, name, beside):
    source = name if name == SCRIPT else f"notebooks/{name}"
    update(wheel)
    (copies.COPIES / name).write_text("my edits")
    assert update(wheel) == ([], {**FIRST, name: "my edits"})  # there is no newer version
    _write(wheel, {source: "v2"})
    for _ in range(2):
        [line], held = update(wheel)
        assert held == {**FIRST, name: "my edits", beside: "v2"}
        assert f"{name} has your edits and stays as it is; the newer version is " in line
        assert line.endswith(beside)
    _write(wheel, {source: "v3"})
    assert update(wheel)[1] == {**FIRST, name: "my edits", beside: "v3"}
    (copies.COPIES / beside).unlink()
    assert update(wheel) == ([], {**FIRST, name: "my edits"})
    _write(wheel, {source: "v4"})
    [line], held = update(wheel)
    assert held[beside] == "v4"


@pytest.fixture
def edited(wheel):
    """The wheel's files, of which a notebook is newer than the copy that its reader has edited."""
    update(wheel)
    (copies.COPIES / NOTEBOOK).write_text("my edits")
    _write(wheel, {f"notebooks/{NOTEBOOK}": "v2"})
    update(wheel)
    return wheel


def test_taking_the_newer_version_ends_the_matter(edited):
    (copies.COPIES / f"new-{NOTEBOOK}").replace(copies.COPIES / NOTEBOOK)
    assert update(edited) == ([], {**FIRST, NOTEBOOK: "v2"})
    _write(edited, {f"notebooks/{NOTEBOOK}": "v3"})
    assert update(edited) == ([], {**FIRST, NOTEBOOK: "v3"})


def test_a_newer_version_leaves_its_place_beside_a_copy_that_holds_it(edited):
    (copies.COPIES / NOTEBOOK).unlink()
    assert update(edited) == ([], {**FIRST, NOTEBOOK: "v2"})


def test_edits_of_the_newer_version_stay_too(edited):
    (copies.COPIES / f"new-{NOTEBOOK}").write_text("edits again")
    _write(edited, {f"notebooks/{NOTEBOOK}": "v3"})
    [line], held = update(edited)
    assert held == {**FIRST, NOTEBOOK: "my edits", f"new-{NOTEBOOK}": "edits again"}
    assert line.endswith(f"the newer version is {edited / 'notebooks' / NOTEBOOK}")


def test_what_the_wheel_no_longer_has_goes_unless_it_is_edited(wheel):
    _write(wheel, {"notebooks/15_gone.ipynb": "old", "notebooks/16_gone.ipynb": "old"})
    update(wheel)
    _write(copies.COPIES, {"16_gone.ipynb": "my edits", "17_mine.ipynb": "mine"})
    for number in (15, 16):
        (wheel / "notebooks" / f"{number}_gone.ipynb").unlink()
    for _ in range(2):
        assert update(wheel) == ([], {**FIRST, "16_gone.ipynb": "my edits", "17_mine.ipynb": "mine"})


@pytest.mark.parametrize("record", ["{", "[1]", None, '{"00_measure.ipynb": 5}'])
def test_without_its_record_every_difference_is_an_edit(wheel, record):
    update(wheel)
    path = copies.COPIES / copies._RECORD
    assert set(json.loads(path.read_text())) == set(FIRST)
    path.unlink()
    if record is not None:
        path.write_text(record)
    _write(wheel, {f"notebooks/{NOTEBOOK}": "v2"})
    assert update(wheel)[1] == {**FIRST, f"new-{NOTEBOOK}": "v2"}


def test_in_the_folder_of_the_copies_they_stay_where_they_are(wheel, monkeypatch, tmp_path):
    update(wheel)
    monkeypatch.chdir(copies.COPIES)
    assert copies.update_copies(print, wheel / "notebooks") == tmp_path / "here" / copies.COPIES
    assert not copies.COPIES.exists()


def test_a_folder_that_cannot_be_written_to_is_named_with_the_remedy(wheel):
    copies.COPIES.write_text("a file")
    with pytest.raises(OSError, match=r"cannot hold the notebooks' copies .*: run labkit in another folder"):
        update(wheel)
    copies.COPIES.unlink()
    (copies.COPIES / NOTEBOOK).mkdir(parents=True)
    with pytest.raises(OSError, match="Is a directory"):
        update(wheel)


def test_several_processes_take_turns(wheel):
    code = (
        "import sys, pathlib; from labkit.app.notebooks import update_copies; "
        "update_copies(print, pathlib.Path(sys.argv[1]))"
    )
    with file_lock(copies.COPIES / f"{copies._RECORD}.lock"):
        processes = [subprocess.Popen([sys.executable, "-c", code, str(wheel / "notebooks")]) for _ in range(3)]
        with suppress(subprocess.TimeoutExpired):
            processes[0].wait(1)
        assert not (copies.COPIES / NOTEBOOK).exists()
    assert [process.wait(60) for process in processes] == [0] * 3
    assert update(wheel) == ([], FIRST)
