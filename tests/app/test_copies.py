"""Copies of a wheel's notebooks: up to date where the reader has not edited them, and never over edits."""

import json
import subprocess
import sys

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from labkit.app.notebooks import COPIES, update_copies
from tests.paths import contents

NOTEBOOK, SCRIPT = "00_measure.ipynb", "data_scripts/make_photos.py"
FIRST = {NOTEBOOK: "v1", "11_ladder.png": "png", "figures/way.svg": "picture", SCRIPT: "script v1"}
RECORD = ".labkit-copies.json"


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """The folders of a wheel; the current folder is an empty one."""
    write(tmp_path / "wheel", {**FIRST, "data_scripts/__pycache__/make_photos.pyc": "compiled"})
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "wheel"


def write(wheel, texts):
    for name, text in texts.items():
        path = wheel / (name if name.startswith("data_scripts/") else f"notebooks/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def update(wheel):
    """Lines that are said, but for the number of copies; and what the folder holds, but for the record."""
    lines = []
    folder = update_copies(lines.append, wheel / "notebooks")
    held = {name: data.decode() for name, data in contents(folder).items() if not name.startswith(".")}
    return [line for line in lines if not line.endswith("copied")], held


def test_copies_are_made_once_and_made_again_where_they_are_missing(wheel, tmp_path):
    assert update(wheel) == ([], FIRST)
    before = (COPIES / NOTEBOOK).stat()
    (COPIES / SCRIPT).unlink()
    lines = []
    assert update_copies(lines.append, wheel / "notebooks") == tmp_path / "here" / "labkit-notebooks"
    assert [line for line in lines if ": 1 files copied" in line] == lines != []
    assert (COPIES / NOTEBOOK).stat() == before
    assert update(wheel) == ([], FIRST)


def test_a_newer_version_replaces_a_copy_and_what_the_wheel_lacks_stays(wheel):
    write(wheel, {"15_gone.ipynb": "old"})
    update(wheel)
    (wheel / "notebooks" / "15_gone.ipynb").unlink()
    newer = {NOTEBOOK: "v2", SCRIPT: "script v2"}
    write(wheel, newer)
    assert update(wheel) == ([], {**FIRST, **newer, "15_gone.ipynb": "old"})


@pytest.mark.parametrize("name", [NOTEBOOK, SCRIPT])
def test_an_edited_copy_stays_and_is_named_where_there_is_a_newer_version(wheel, name):
    update(wheel)
    (COPIES / name).write_text("my edits")
    assert update(wheel) == ([], {**FIRST, name: "my edits"})  # there is no newer version
    write(wheel, {name: "v2"})
    for _ in range(2):
        [line], held = update(wheel)
        assert held == {**FIRST, name: "my edits"}
        assert f"{name} has your edits and stays as it is: move it away to get the newer version" in line
    (COPIES / name).unlink()
    assert update(wheel) == ([], {**FIRST, name: "v2"})


@pytest.mark.parametrize("record", ["{", "[1]", None, '{"00_measure.ipynb": 5}'])
def test_without_its_record_every_difference_is_an_edit(wheel, record):
    update(wheel)
    assert set(json.loads((COPIES / RECORD).read_text())) == set(FIRST)
    (COPIES / RECORD).unlink()
    if record is not None:
        (COPIES / RECORD).write_text(record)
    write(wheel, {NOTEBOOK: "v2"})
    [line], held = update(wheel)
    assert held == FIRST
    assert f"{NOTEBOOK} has your edits" in line


def notebook(source, outputs=(), **metadata):
    cells = [new_code_cell(source, outputs=list(outputs), id="a")]
    return nbformat.writes(new_notebook(cells=cells, metadata=metadata))


def test_a_notebook_is_edited_by_another_source_not_by_a_run(wheel):
    write(wheel, {NOTEBOOK: notebook("1 + 1")})
    update(wheel)
    ran = notebook(
        "1 + 1",
        [new_output("execute_result", {"text/plain": "2"})],
        language_info={"name": "python", "version": "3.99"},
    )
    (COPIES / NOTEBOOK).write_text(ran)
    assert update(wheel) == ([], {**FIRST, NOTEBOOK: ran})  # there is no newer version
    newer = notebook("1 + 2")
    write(wheel, {NOTEBOOK: newer})
    assert update(wheel) == ([], {**FIRST, NOTEBOOK: newer})
    stored_anew = notebook("1 + 2", [new_output("execute_result", {"text/plain": "3"})])
    write(wheel, {NOTEBOOK: stored_anew})
    assert update(wheel) == ([], {**FIRST, NOTEBOOK: stored_anew})
    edited = notebook("my edits")
    (COPIES / NOTEBOOK).write_text(edited)
    write(wheel, {NOTEBOOK: notebook("1 + 3")})
    [line], held = update(wheel)
    assert held == {**FIRST, NOTEBOOK: edited}
    assert f"{NOTEBOOK} has your edits" in line


def test_in_the_folder_of_the_copies_they_stay_where_they_are(wheel, monkeypatch, tmp_path):
    update(wheel)
    monkeypatch.chdir(COPIES)
    assert update_copies(print, wheel / "notebooks") == tmp_path / "here" / COPIES
    assert not COPIES.exists()


def test_a_folder_that_cannot_be_written_to_is_named_with_the_remedy(wheel):
    COPIES.write_text("a file")
    with pytest.raises(OSError, match=r"cannot hold the notebooks' copies .*: run labkit in another folder"):
        update(wheel)
    COPIES.unlink()
    (COPIES / NOTEBOOK).mkdir(parents=True)
    with pytest.raises(OSError, match="Is a directory"):
        update(wheel)


def test_several_processes_take_turns(wheel):
    code = "import sys, pathlib, labkit.app.notebooks as n; n.update_copies(print, pathlib.Path(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(wheel / "notebooks")]
    processes = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(120) for process in processes] == [0, 0]
    assert update(wheel) == ([], FIRST)
