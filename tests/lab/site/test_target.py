"""The folder of a site: replaced whole, or left alone."""

import pytest

from labkit.lab.site.target import RECORD, check_target, replaced_whole
from tests.paths import contents


def fail():
    raise KeyError("a page")


def put_site(folder, during=lambda: None, **files):
    with replaced_whole(folder) as scratch:
        (scratch / "html").mkdir()
        for name, text in files.items():
            (scratch / "html" / name).write_text(text)
        during()


def test_a_site_replaces_an_earlier_one_whole(tmp_path):
    put_site(tmp_path / "out", a="1", b="1")
    put_site(tmp_path / "out", b="2")
    found = contents(tmp_path)
    assert found.pop(f"out/{RECORD}")
    assert found == {"out/b": b"2"}


def test_an_error_leaves_the_earlier_one(tmp_path):
    put_site(tmp_path / "out", a="1")
    before = contents(tmp_path)
    with pytest.raises(KeyError, match="a page"):
        put_site(tmp_path / "out", during=fail, b="2")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["thesis.tex", ".git"])
def test_a_folder_with_something_else_is_refused(tmp_path, name):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("mine")
    with pytest.raises(ValueError, match=rf"out is not empty and holds no site, but '{name}': name another folder"):
        put_site(tmp_path / "out", a="1")
    assert contents(tmp_path) == {f"out/{name}": b"mine"}


def test_what_appears_during_the_build_is_not_lost(tmp_path):
    def put_mine():
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine").write_text("1")

    with pytest.raises(ValueError, match="holds no site"):
        put_site(tmp_path / "out", during=put_mine, a="1")
    assert contents(tmp_path) == {"out/mine": b"1"}


def test_a_file_is_refused(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ValueError, match="out is a file: name a folder"):
        check_target(tmp_path / "out")


def test_an_empty_folder_and_a_new_one_are_accepted(tmp_path):
    check_target(tmp_path)
    check_target(tmp_path / "new")
