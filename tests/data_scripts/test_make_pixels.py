"""data_scripts/make_pixels.py: what a reader types, and what it refuses in one line."""

import runpy
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from labkit import PixelStore
from tests.paths import REPO

SCRIPT = REPO / "data_scripts" / "make_pixels.py"


@pytest.fixture
def images(tmp_path) -> Path:
    for name in ("a/0.png", "b/1.png"):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True)
        Image.fromarray(np.full((20, 30, 3), len(name), np.uint8)).save(path)
    return tmp_path / "images"


def run(*arguments):
    return CliRunner().invoke(runpy.run_path(str(SCRIPT))["app"], list(map(str, arguments)))


def test_it_builds_and_a_rerun_says_the_same(images, tmp_path):
    arguments = [images, tmp_path / "out" / "p", "--short-side", 10, "--engine", "threads"]
    for _ in range(2):
        result = run(*arguments)
        assert (result.exit_code, result.stderr) == (0, "")
        assert result.stdout == f"{tmp_path / 'out' / 'p'}: 2 images, {(tmp_path / 'out' / 'p').stat().st_size} bytes\n"
    assert PixelStore(tmp_path / "out" / "p").shapes.tolist() == [[10, 15]] * 2


def fails(said: str, *arguments) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.startswith("make_pixels: ")
    assert result.stderr.count("\n") == 1


def test_wrong_input_is_one_line(images, tmp_path):
    path = tmp_path / "p"
    fails("missing", tmp_path / "missing", path)
    fails("short_side=0", images, path, "--short-side", 0)
    fails("local, threads, ray", images, path, "--engine", "dask")
    fails("is not a pixel store", images, images / "a" / "0.png")
    assert list(tmp_path.iterdir()) == [images]


def test_a_broken_image_is_one_line(images, tmp_path):
    (images / "b" / "1.png").write_bytes(b"broken")
    fails(
        "1 of 2 items failed, the others are done: b/1.png: DecodeError", images, tmp_path / "p", "--engine", "threads"
    )
    assert not (tmp_path / "p").exists()
