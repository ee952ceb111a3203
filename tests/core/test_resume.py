"""Resuming: a folder is claimed by one job; anything else in it is named, with the remedy, and left alone."""

import json
from pathlib import Path

import pytest

from labkit.util import files as resume
from labkit.util.files import claim_folder, holds_record, read_record, write_record

RECORD = {"seed": 0, "kind": "day"}


def claim(folder: Path, record: dict = RECORD, name: str = "settings.json", **options) -> dict:
    return claim_folder(folder, name, record, what="things", **options)


@pytest.mark.parametrize("name", ["settings.json", "unfinished/settings.json"])
def test_a_new_folder_is_claimed_and_taken_up(tmp_path, name):
    for _ in range(2):
        assert claim(tmp_path / "new" / "set", name=name) == RECORD
    assert json.loads((tmp_path / "new" / "set" / name).read_text()) == RECORD
    assert [path.name for path in tmp_path.rglob("*.json")] == ["settings.json"]


def test_progress_of_the_same_job_is_returned(tmp_path):
    record = {"settings": RECORD, "done": []}
    claim(tmp_path, record, key="settings")
    write_record(tmp_path / "settings.json", {**record, "done": ["a"]}, indent=1)
    assert claim(tmp_path, record, key="settings")["done"] == ["a"]


@pytest.mark.parametrize("name", ["settings.json", "unfinished/settings.json"])
def test_a_run_killed_before_it_wrote_its_record(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / ".1-0123abcd.partial").write_bytes(b"half")
    assert claim(tmp_path, name=name) == RECORD


def test_another_process_claims_the_folder_meanwhile(tmp_path, monkeypatch):
    def list_before_the_other_writes(folder):
        write_record(folder / "settings.json", RECORD)
        return []

    monkeypatch.setattr("labkit.util.files.os.listdir", list_before_the_other_writes)
    assert claim(tmp_path) == RECORD


def assert_refused(folder: Path, said: str, **options) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*")}
    with pytest.raises(ValueError, match=said) as failure:
        claim(folder, **options)
    assert str(folder) in str(failure.value)
    assert "choose " in str(failure.value).rpartition(": ")[2]
    assert {path: path.read_bytes() for path in folder.rglob("*")} == before


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("important")
    assert_refused(tmp_path, "holds no things, but 'thesis.txt': choose a new folder, or an empty one")


@pytest.mark.parametrize(
    ("found", "listed"),
    [
        ({"seed": 1, "kind": "day"}, r"\(seed 1, not 0\)"),
        ({"seed": 1, "kind": "night"}, r"\(seed 1, not 0, kind 'night', not 'day'\)"),
        ({**RECORD, "extra": True}, r"\(extra True, not None\)"),
    ],
)
def test_another_job_is_refused(tmp_path, found, listed):
    write_record(tmp_path / "settings.json", found)
    assert_refused(tmp_path, f"holds other things {listed}")


@pytest.mark.parametrize(
    "text", [b"{", b"[]", b"null", b"{}", b"\xff\xfe", b"\xff{}", b'{"settings": 1}', b"[" * 100_000]
)
def test_a_damaged_record_is_refused(tmp_path, text):
    (tmp_path / "settings.json").write_bytes(text)
    record = {"settings": RECORD}
    assert_refused(tmp_path, r"settings\.json is damaged, or not labkit's", record=record, key="settings")
    assert not holds_record(tmp_path / "settings.json", record)


def test_records_are_compared_whole(tmp_path):
    path = tmp_path / "deep" / "record.json"
    assert read_record(path) is None
    assert not holds_record(path, RECORD)
    write_record(path, RECORD)
    assert [holds_record(path, record) for record in (RECORD, {"seed": 0})] == [True, False]


def test_callers_choose_error_and_remedy(tmp_path):
    with pytest.raises(FileExistsError, match=r"p holds other pixels \(side 1, not 2\): run away$"):
        resume.check_same_job(
            Path("p"), {"side": 1}, {"side": 2}, what="pixels", remedy="run away", error=FileExistsError
        )


def test_more_items_than_asked_for(tmp_path):
    resume.check_count(tmp_path, 3, 3, what="photos")
    with pytest.raises(ValueError, match="holds 4 photos, more than 3: choose another folder"):
        resume.check_count(tmp_path, 4, 3, what="photos")


def test_foreign_names(tmp_path):
    assert resume.foreign_names(tmp_path / "none", lambda name: False) == []
    for name in ("c", "b", "own", ".x.partial"):
        (tmp_path / name).touch()
    assert resume.foreign_names(tmp_path, lambda name: name == "own") == ["b", "c"]


def test_damage_names_the_file():
    said = r"^x is damaged, or not labkit's \(KeyError: 'rows'\): "
    with pytest.raises(ValueError, match=said), resume.damage_named(Path("x")):
        {}["rows"]
