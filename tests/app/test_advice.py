"""Whoever does what an error of a command advises gets what it promises."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import torch
from PIL import Image

import labkit as lk
from labkit import course
from labkit.app.cli import main
from labkit.app.notebooks import find_notebooks
from labkit.course.results import known_results
from labkit.peers.photos import sample_photos
from labkit.util.gone import GONE
from tests.image_files import write_pictures
from tests.paths import REPO, invoke
from tests.tars import make_tar

TRAIN = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset
weight = torch.zeros(4, 1, requires_grad=True)
steps = torch.optim.SGD([weight], 0.1)
for batch, in DataLoader(TensorDataset(torch.ones(200, 4)), 2):
    (batch @ weight).mean().backward()
    steps.step()
print(sys.argv[1:])
"""


def run(*words):
    """What a command says, and its status."""
    done = invoke(main, [str(word) for word in words], env={"COLUMNS": "500"})
    return done.output, done.exit_code


def shell(*words, cwd):
    command = [sys.executable, "-m", "labkit", *map(str, words)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(REPO)})


def test_options_of_a_script_go_after_its_name_and_reports_into_files_of_their_own(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    said, status = run("watch", "--lr=1", "train.py")
    assert (status, "write those of the script after its name" in said) == (2, True)
    (tmp_path / "notes.json").write_text("mine")
    said, status = run("watch", "--json", tmp_path / "notes.json", tmp_path / "train.py")
    assert "choose another name, or move that file away" in said
    assert (status, (tmp_path / "notes.json").read_text()) == (2, "mine")
    done = shell("watch", "--json", "other.json", "train.py", "--lr=1", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "['--lr=1']\n"), done.stderr
    report = tmp_path / "other.json"
    assert lk.plan(report, batch_size=2, cores_per_node=4, cpu_ms_per_image=1).demand > 0  # which reads it
    report.write_text(json.dumps({**json.loads(report.read_text()), "schema_version": 99}))
    with pytest.raises(lk.LabkitError, match="upgrade labkit, or watch that run again with this one"):
        lk.plan(report, batch_size=2, cores_per_node=4)


def test_options_of_tiles_go_with_tiles(tmp_path):
    photos = write_pictures(tmp_path / "photos", "cat/1.jpg", "dog/2.jpg")
    tar = make_tar(tmp_path / "photos.tar", {"cat/1.jpg": (photos / "cat/1.jpg").read_bytes()})
    said, status = run("convert", tar, tmp_path / "tiles", "--short-side", 8)
    assert (status, "pass --to tiles with them" in said) == (2, True)
    assert run("convert", tar, tmp_path / "tiles", "--short-side", 8, "--to", "tiles")[1] == 0
    assert len(lk.FolderStore(tmp_path / "tiles")) == 1


def test_a_notebook_that_is_named_is_found_and_one_that_is_none_is_left_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said, status = run("tour", "--only", "99")
    assert status != 0
    for name in said.partition("there are ")[2].split(", "):
        assert [notebook.name for notebook in find_notebooks(name.strip())] == [name.strip()]
    (tmp_path / "00_odd.ipynb").write_text("odd")
    (tmp_path / "01_good.ipynb").write_text(json.dumps({"cells": [{"source": ["# x"]}]}))
    with pytest.raises(lk.LabkitError, match="repair or remove it"):
        find_notebooks(folder=tmp_path)
    (tmp_path / "00_odd.ipynb").unlink()
    assert [notebook.name for notebook in find_notebooks(folder=tmp_path)] == ["01_good"]


def test_what_takes_the_place_of_commands_names_and_options_is_there(tmp_path):
    """Commands by their help, and names by their modules."""
    assert "`lk.plan` does it" in GONE["labkit plan"]
    assert callable(lk.plan)
    assert "--store" in run("tour", "--help")[0]
    assert hasattr(torch.profiler.profile, re.search(r"prof\.(\w+)\(path\)", GONE["labkit watch --trace"])[1])
    told = set(GONE.values())
    for command in (each for each in told if "python -m labkit" in each):
        words = shlex.split(re.search(r"`python -m labkit ([^`]*)`", command)[1])
        assert run(words[0], "--help")[1] == 0
    assert sum("course.compare_peers(peers=[...])" in each for each in told) == 1
    assert callable(course.compare_peers)
    assert "--own" in run("peers", "--help")[0]
    photos = write_pictures(tmp_path / "photos", "cat/1.jpg", "dog/2.jpg", size=(64, 48))
    lk.tile_jpegs(photos, tmp_path / "tiles", progress=False)
    own = sample_photos(tmp_path / "tiles", tmp_path / "copies", 0.01)
    assert len(own.sizes) == 2
    crops = [(16, (0.25, 1), 2)]
    assert len(next(iter(lk.BatchLoader(photos, crops=crops, batch_size=2)))[0]) == 2


def test_a_folder_without_jpegs_gets_some(tmp_path):
    pngs = write_pictures(tmp_path / "pngs", "cat/1.png")
    with pytest.raises(lk.LabkitError, match="or write some of its images as JPEGs into one"):
        sample_photos(pngs, tmp_path / "copies", 0.01)
    with Image.open(pngs / "cat/1.png") as image:
        (tmp_path / "jpegs").mkdir()
        image.save(tmp_path / "jpegs" / "1.jpg")
    assert len(sample_photos(tmp_path / "jpegs", tmp_path / "copies", 0.01).sizes) == 1


def test_a_damaged_result_is_deleted_and_its_notebook_run_again(recorded_frames, monkeypatch):
    monkeypatch.setenv("LABKIT_RESULTS", str(recorded_frames))
    monkeypatch.setenv("LABKIT_SCALE", "laptop")
    course.result("02_y", "It is so.")
    path = recorded_frames.with_name("results") / "02_y.json"
    path.write_text("{}")
    with pytest.raises(lk.LabkitError, match="delete it, and run its notebook again"):
        known_results()
    path.unlink()
    course.result("02_y", "It is so.")
    assert known_results()["02_y"].sentences == ("It is so.",)
