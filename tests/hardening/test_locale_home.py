"""Every data script, store and decoder on a C locale with a home that cannot be written to, all in one process."""

import json
import os
import sys

import pytest
from typer.testing import CliRunner

from labkit.app import cli
from labkit.util import process as streams
from tests.hardening.odd_places import run_there
from tests.paths import SCRIPTS


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("odd")
    done = run_there(folder, "-m", "tests.hardening.odd_places", str(folder))
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    lines = done.stdout.decode("utf-8", "surrogateescape").splitlines()
    return folder, dict(json.loads(line) for line in lines if line.startswith("[")), done


@pytest.mark.exhaustive
def test_everything_works_there(walked):
    _, steps, _ = walked
    assert {step: result for step, result in steps.items() if result != "ok"} == {}
    assert {path.stem for path in SCRIPTS.glob("*.py")} <= set(steps)


@pytest.mark.exhaustive
def test_names_on_the_disk_are_utf8(walked):
    """Looked at as bytes, which no locale changes."""
    folder, _, done = walked
    root = os.fsencode(folder)
    assert sorted(os.listdir(root)) == sorted([*map(str.encode, ("gemächt", "Größe 日本", "Öut")), b"home"])
    photos = {"é.jpg".encode(), "日 本.jpg".encode(), b"\xff.jpg"}
    for place in ("Größe 日本/ß", "Öut/extrahiért/tär-pax/ß", "Öut/extrahiért/tär-gnu/ß"):
        assert set(os.listdir(root + b"/" + place.encode())) == photos
    rows = (folder / "Öut" / "größen.csv").read_bytes().splitlines()
    assert {row.split(b",")[0] for row in rows[1:]} == {"ß/".encode() + photo for photo in photos}
    assert "Öut/größen.csv: 3 images".encode() in done.stdout


def test_the_place_is_as_odd_as_it_should_be(tmp_path):
    script = "import os, pathlib, sys; print(sys.getfilesystemencoding()); pathlib.Path.home().joinpath('x').mkdir()"
    done = run_there(tmp_path, "-c", script)
    if done.returncode == 0:
        pytest.skip("this user writes to folders without write permission")
    assert done.stdout == b"ascii\n"
    assert b"PermissionError" in done.stderr


def test_a_tour_without_a_home_names_the_remedy(monkeypatch):
    monkeypatch.setenv("LABKIT_HOME", "/proc/labkit")  # not even root makes a folder there
    result = CliRunner().invoke(cli.app, ["tour", "--only", "00"])
    assert result.exit_code == 2
    assert result.stderr.startswith("labkit: /proc/labkit cannot be written to")
    assert "LABKIT_HOME" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(("encoding", "printed"), [("ascii", "é…\udcff"), ("utf-8", "é…"), ("latin-1", "é")])
def test_only_ascii_streams_become_utf8(monkeypatch, tmp_path, encoding, printed):
    with open(tmp_path / "out", "w", encoding=encoding) as file:
        monkeypatch.setattr(sys, "stdout", file)
        streams.print_utf8()
        print(printed, end="")
    wanted = "utf-8" if encoding == "ascii" else encoding
    assert (tmp_path / "out").read_bytes() == printed.encode(wanted, "surrogateescape")
