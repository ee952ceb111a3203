"""Storing: all notebooks of one run of one commit, or none."""

import json
import re
import subprocess
from base64 import b64decode, b64encode
from io import BytesIO

import nbformat
import numpy as np
import pytest
from matplotlib.figure import Figure
from nbformat.v4 import new_code_cell, new_notebook, new_output
from PIL import Image

import labkit as lk
from labkit.app import storing
from labkit.app.notebooks import Executed, Notebook
from labkit.course import ladder, starting
from labkit.measure.frames import MEASURE_VERSION, save_frame
from labkit.util.machine import environment
from labkit.util.pictures import encode_image, png_base64
from tests.paths import contents

UNSTABLE = "/tmp/ipykernel_1/2.py:3: InstabilityWarning: {}: unstable: spread 40%\n  lk.summarize(runs)\n"
REASON = "{}: unstable: spread 40%"


def git(folder, *arguments):
    own = ["-c", "user.name=me", "-c", "user.email=me@here", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", folder, *own, *arguments], check=True, capture_output=True)


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A clone with one commit; its notebooks' folder."""
    folder = tmp_path / "clone" / "notebooks"
    folder.mkdir(parents=True)
    (folder / "00_a.ipynb").write_text("{}")
    git(folder.parent, "init")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "first")
    monkeypatch.setattr(storing, "NOTEBOOK_FOLDER", folder)
    return folder


def executed(folder, name, *outputs):
    node = new_notebook(cells=[new_code_cell("1", outputs=list(outputs), execution_count=1)])
    return Executed(Notebook(folder / f"{name}.ipynb", "Why?", "3"), node, 1.0)


def stderr(*parts):
    return [new_output("stream", name="stderr", text=part) for part in parts]


def test_a_run_is_described_by_its_commit_its_machine_and_what_its_figures_mean(clone):
    about = storing.describe_run("")
    assert re.fullmatch(r"\d{8}T\d{6}Z-[0-9a-f]{6}", about["run"])
    assert re.fullmatch(r"[0-9a-f]{40}", about["commit"])
    assert (about["env_id"], about["measure"]) == (lk.env_id(), MEASURE_VERSION)
    assert about["versions"].items() <= environment().items()
    assert {"python", "torch", "pillow"} <= set(about["versions"])
    assert storing.describe_run("")["run"] != about["run"]
    for changed in ("00_a.ipynb", "new.py"):
        (clone / changed).write_text("else")
        assert storing.find_commit(clone) == f"{about['commit']}-dirty"
        git(clone, "stash", "--include-untracked")
        assert storing.find_commit(clone) == about["commit"]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("no git", "needs git and a clone, .*No such file"),
        ("no clone", r"needs git and a clone, and .* is in none: .*not a git repository"),
    ],
)
def test_what_cannot_be_stored_is_refused_before_anything_runs(clone, tmp_path, monkeypatch, place, message):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    if place == "no git":
        monkeypatch.setenv("PATH", str(tmp_path))
    if place == "no clone":
        monkeypatch.setattr(storing, "NOTEBOOK_FOLDER", tmp_path)
    with pytest.raises(ValueError, match=message):
        storing.describe_run("")


@pytest.mark.parametrize(
    ("outputs", "unstable", "refused"),
    [
        ([], "", ""),
        ([new_output("stream", text=UNSTABLE.format("a"))], "", ""),
        (stderr(UNSTABLE.format("a")), "a", ""),
        (stderr(UNSTABLE.format("a")[:30], UNSTABLE.format("a")[30:]), "a", ""),
        (stderr(2 * UNSTABLE.format("a"), UNSTABLE.format("b")), "aab", ""),
        (stderr(UNSTABLE.format("a"), "hm"), "a", "wrote to stderr, and so cannot be stored: hm"),
        (stderr("x.py:1: UserWarning: no\n  f()\n"), "", "wrote to stderr, and so cannot be stored: x.py:1: UserW"),
    ],
)
def test_what_a_run_wrote_to_stderr_is_an_instability_or_refuses_it(tmp_path, outputs, unstable, refused):
    run = executed(tmp_path, "00_a", *outputs)
    assert storing.unstable_variants(run) == [REASON.format(name) for name in unstable]
    assert storing.refusal(run).startswith(refused)
    assert bool(storing.refusal(run)) == bool(refused)


def test_a_stored_notebook_names_its_run_and_shows_what_disturbed_it(clone):
    png = encode_image(Image.effect_noise((40, 40), 50), "PNG")
    plot = new_output("display_data", {"image/png": b64encode(png).decode()})
    runs = [executed(clone, "00_a", plot), executed(clone, "01_b", *stderr(UNSTABLE.format("pil")), plot)]
    runs[0].node.metadata["language_info"] = {"version": "3.99"}
    about = storing.describe_run("")
    storing.store_all(runs, about, clone)
    assert sorted(contents(clone)) == ["00_a.ipynb", "01_b.ipynb"]
    first, second = (json.loads(data) for _, data in sorted(contents(clone).items()))
    assert first["metadata"]["labkit"] == second["metadata"]["labkit"] == {**about, "seconds": 1}
    assert first["metadata"]["language_info"] == {"name": "python"}
    shown, plotted = second["cells"][0]["outputs"]
    assert (shown["name"], shown["text"]) == ("stdout", ["InstabilityWarning: pil: unstable: spread 40%\n"])
    assert "text" not in plotted
    assert (clone / "00_a.ipynb").read_text().endswith("}\n")


def test_a_plot_in_few_colors_is_the_same_plot_in_fewer_bytes():
    figure = Figure()
    figure.add_subplot().plot([1, 2, 3], color="firebrick")
    png = png_base64(figure)
    few = storing.in_few_colors(png)
    before, after = (np.asarray(Image.open(BytesIO(b64decode(one))).convert("RGB"), int) for one in (png, few))
    assert len(few) < len(png)
    assert np.abs(before - after).mean() < 1


def test_a_commit_that_changes_during_the_run_is_dirty(clone):
    about = storing.describe_run("")
    git(clone, "commit", "--allow-empty", "-m", "second")
    storing.store_all([executed(clone, "00_a")], about, clone)
    stored = json.loads((clone / "00_a.ipynb").read_text())["metadata"]["labkit"]
    assert stored == {**about, "commit": f"{about['commit']}-dirty", "seconds": 1}


def test_the_ladders_frame_and_figure_are_stored_with_the_notebooks(clone, tmp_path, frame_of):
    runs = frame_of({"naive": [1, 1.1], "quick": [2, 2.2]}, "naive", experiment=ladder.EXPERIMENT, photos="p")
    frame = save_frame(runs, tmp_path / "frames" / ladder.FRAME)
    storing.store_all([executed(clone, ladder.NOTEBOOK)], storing.describe_run(""), frame.parent)
    assert (clone / ladder.FRAME).read_bytes() == frame.read_bytes()
    assert ladder.drawn_from(clone / ladder.FIGURE)


def test_the_decision_tree_is_stored_with_the_gains_of_the_whole_run_and_the_runs_behind_it(clone, runs_of, tmp_path):
    decoders = runs_of("02 decoders, imagenet", turbojpeg=3, cv2=2).replace({"base": "pil"})
    save_frame(decoders, tmp_path / "frames" / "02.csv")
    save_frame(runs_of("00 twins", other=1), tmp_path / "frames" / "00.csv")
    run = executed(clone, starting.NOTEBOOK)
    run.node.cells.append(new_code_cell("import labkit as lk\n\nlk.where_to_start()"))
    storing.store_all([run], storing.describe_run(""), tmp_path / "frames")
    stored = lk.load_frame(clone / starting.FRAME)
    assert set(stored["experiment"]) == {"02 decoders, imagenet"}
    assert set(stored["variant"]) == {"pil", "turbojpeg"}
    [shown] = nbformat.read(clone / f"{starting.NOTEBOOK}.ipynb", as_version=4).cells[-1].outputs
    assert "3.00x" in shown["data"]["text/markdown"]


@pytest.mark.parametrize("reason", ["no ladder was recorded", "a file cannot be written"])
def test_nothing_is_stored_if_one_file_cannot_be(clone, reason):
    before = contents(clone)
    (clone / "no folder").touch()
    last = ladder.NOTEBOOK if reason == "no ladder was recorded" else "no folder/01_b"
    with pytest.raises(OSError, match=ladder.FRAME if last == ladder.NOTEBOOK else "no folder"):
        storing.store_all([executed(clone, "00_a"), executed(clone, last)], storing.describe_run(""), clone)
    (clone / "no folder").unlink()
    assert contents(clone) == before
