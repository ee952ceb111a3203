"""Whoever does what a message of these helpers advises gets what it promises: each is followed to its end."""

import re
import shlex
import subprocess
import tomllib
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

import labkit as lk
from labkit import course
from labkit.util.arguments import max_file_bytes
from labkit.util.machine import install_command
from labkit.util.ranks import rank_and_world_size
from tests.image_files import write_pictures
from tests.paths import REPO

MEAN = (0.485, 0.456, 0.406)


def told(call) -> str:
    with pytest.raises(Exception) as caught:
        call()
    return str(caught.value)


@pytest.fixture
def photos(tmp_path) -> Path:
    return write_pictures(tmp_path / "photos", "cat/1.jpg", "cat/2.png", "dog/3.jpg")


def images_of(loader) -> torch.Tensor:
    return torch.cat([images for images, _ in loader])


# What packages are missing


def test_every_extra_that_is_named_has_the_package_that_is_missing():
    """`python -m pip install -e ".[extra]"` is the way of a clone."""
    extras = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {
        (extra, package)
        for path in REPO.glob("labkit/**/*.py")
        for extra in re.findall(r"install_command\(['\"](\w+)['\"]\)", path.read_text())
        for package in {"cluster": ["ray"], "s3": ["s3fs"], "fast": ["turbojpeg"], "peers": ["py-spy"],
                        "site": ["sphinx", "myst-nb", "pydata-sphinx-theme"], "test": ["pytest"],
                        "loaders": ["torch", "torchvision"]}[extra]
    }  # fmt: skip
    assert {extra for extra, _ in named} >= {"cluster", "s3", "peers", "site"}
    for extra, package in named:
        assert any(re.match(rf"{package}\b", each) for each in extras[extra]), extra
        assert shlex.split(install_command(extra))[-1].endswith(f"[{extra}]")


# Arguments


def test_a_mean_of_bytes_is_divided(photos):
    options = {"size": 16, "dtype": torch.float32}
    of_bytes = [255 * each for each in MEAN]
    said = told(lambda: lk.BatchLoader(photos, mean=of_bytes, std=(58, 57, 57), **options))
    assert "divide by 255" in said
    mean, std = np.divide(of_bytes, 255), np.divide((58, 57, 57), 255)
    images = images_of(lk.BatchLoader(photos, mean=mean, std=std, train=False, **options))
    plain = images_of(lk.BatchLoader(photos, size=16, train=False)).float() / 255
    expected = (plain - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(images, expected.float(), atol=1e-5, rtol=0, check_stride=False)


def test_a_class_is_made_an_object(photos):
    assert "make one of it, CenterCrop(...)" in told(lambda: lk.ImageDataset(photos, transform=v2.CenterCrop))
    assert lk.ImageDataset(photos, transform=v2.CenterCrop(16))[0][0].shape == (3, 16, 16)


def test_the_limit_of_a_member_takes_megabytes(monkeypatch):
    monkeypatch.setenv("LABKIT_MAX_FILE_MB", "2GB")
    assert "LABKIT_MAX_FILE_MB must be a number of megabytes > 0" in told(max_file_bytes)
    monkeypatch.setenv("LABKIT_MAX_FILE_MB", "2000")
    assert max_file_bytes() == 2e9


# Folders and processes


@pytest.mark.parametrize("variables", [{"RANK": "1", "WORLD_SIZE": "2"}, {}], ids=["both", "neither"])
def test_ranks_are_set_as_torchrun_does_or_not_at_all(monkeypatch, variables):
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match="Set both as torchrun does, or neither"):
        assert rank_and_world_size() == (0, 1)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings(action="error"):
        assert rank_and_world_size() == ((1, 2) if variables else (0, 1))


def test_a_server_that_does_not_start_says_why_when_it_is_run(photos, tmp_path, monkeypatch):
    """By the line that is named, whatever is in the names of its folders."""
    photos = photos.rename(tmp_path / "it's {here} $HOME")
    program = tmp_path / "no python"
    program.write_text('#!/bin/sh\necho "no room for $@" >&2\nexit 3\n')
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    with pytest.raises(lk.LabkitError) as caught, course.serve_s3({"bucket": photos}):
        pass
    line = str(caught.value).partition("to see why, run: ")[2]
    done = subprocess.run(line, shell=True, capture_output=True, text=True)  # noqa: S602
    assert done.returncode == 3
    assert "no room for -m labkit.course.servers s3" in done.stderr
    assert str(photos) in done.stderr
