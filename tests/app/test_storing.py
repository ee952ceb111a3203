"""Storing: all notebooks of one run of one commit, or none."""

import json
import re
import subprocess
from base64 import b64decode
from io import BytesIO

import nbformat
import numpy as np
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from matplotlib.figure import Figure
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from PIL import Image

from labkit.app import storing
from labkit.app.notebooks import Executed, Notebook
from labkit.course import ladder
from labkit.course.results import Ratio, Result
from labkit.measure.frames import MEASURE_VERSION, save_frame
from labkit.util.machine import env_id, environment
from labkit.util.pictures import png_base64
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
    (folder / "guide").mkdir()
    (folder / "guide" / "bottleneck.md").write_text(GAINS)
    git(folder.parent, "init")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "first")
    (folder.parent / "README.md").write_text(README)
    monkeypatch.setattr(storing, "NOTEBOOK_FOLDER", folder)
    monkeypatch.setattr(storing, "STORED", folder / "results.json")
    git(folder.parent, "add", ".")
    git(folder, "commit", "-m", "README")
    return folder


README = "# x\n\n| notebook | the question |\n|---|---|\n| [old](old) | ? |\n\nMore.\n"
GAINS = "| why | **99.9**<!-- 00_a: one worker per core over none --> times, **7** others |\n"
FIRST = "# A\n\n**Question.** Why?\n\n**Result.** (to be stored)\n\n**Minutes.** 3"
FIGURES = {"one worker per core over none": Ratio(3, 2.5, 3.5)}


def executed(folder, name, *outputs):
    cells = [new_markdown_cell(FIRST), new_code_cell("1", outputs=list(outputs), execution_count=1)]
    return Executed(Notebook(folder / f"{name}.ipynb", "Why?", "3"), new_notebook(cells=cells), 1.0)


@pytest.fixture
def recorded(tmp_path):
    """Records a result of each of these notebooks; gives the folder of frames next to them."""

    def recorded(*runs, not_here=()):
        for run in runs:
            name = run.notebook.name
            more = "; more on others." if name == "00_a" else ". More on others."
            told = (f"{name} is **2.5 times** as fast{more}", "And more.")
            found = Result(name, told, not_here, FIGURES, "a box", "laptop")
            path = tmp_path / "results" / f"{name}.json"
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_text(json.dumps(found.to_record()))
        (tmp_path / "frames").mkdir(exist_ok=True)
        return tmp_path / "frames"

    return recorded


def stderr(*parts):
    return [new_output("stream", name="stderr", text=part) for part in parts]


def test_a_run_is_described_by_commit_machine_and_measure(clone):
    about = storing.describe_run("")
    assert re.fullmatch(r"\d{8}T\d{6}Z-[0-9a-f]{6}", about["run"])
    assert re.fullmatch(r"[0-9a-f]{40}", about["commit"])
    assert (about["env_id"], about["measure"]) == (env_id(), MEASURE_VERSION)
    assert about["versions"].items() <= environment().items()
    assert {"python", "torch", "pillow"} <= set(about["versions"])
    assert storing.describe_run("")["run"] != about["run"]
    for changed in ("00_a.ipynb", "new.py"):
        (clone / changed).write_text("else")
        assert storing.find_commit(clone) == f"{about['commit']}-dirty"
        git(clone, "stash", "--include-untracked")
        assert storing.find_commit(clone) == about["commit"]


def test_what_is_in_no_clone_is_refused_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.setattr(storing, "NOTEBOOK_FOLDER", tmp_path)
    with pytest.raises(ValueError, match=r"needs git and a clone, and .* is in none: .*not a git repository"):
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
def test_what_a_run_wrote_to_stderr_is_an_instability_or_refuses_it(tmp_path, recorded, outputs, unstable, refused):
    run = executed(tmp_path, "00_a", *outputs)
    results = recorded(run).with_name("results")
    assert storing.unstable_variants(run) == [REASON.format(name) for name in unstable]
    assert storing.refusal(run, results).startswith(refused)
    assert bool(storing.refusal(run, results)) == bool(refused)


def test_a_run_without_a_result_or_one_that_it_does_not_show_is_refused(tmp_path, recorded):
    run = executed(tmp_path, "00_a")
    assert 'must end with course.result("00_a", ...)' in storing.refusal(run, tmp_path / "results")
    results = recorded(run, not_here=("It is faster.",)).with_name("results")
    assert storing.refusal(run, results) == "this run does not show what its result says: It is faster."


def test_a_stored_notebook_names_its_run_and_shows_what_disturbed_it(clone, recorded):
    plot = png_base64(Figure((0.1, 0.1)))
    shown = new_output("display_data", {"image/png": plot})
    runs = [executed(clone, "00_a"), executed(clone, "01_b", *stderr(UNSTABLE.format("pil")), shown)]
    runs[0].node.metadata["language_info"] = {"version": "3.99"}
    about = storing.describe_run("")
    storing.store_all(runs, about, recorded(*runs))
    assert sorted(contents(clone)) == [
        "00_a.ipynb", "01_b.ipynb", "guide/bottleneck.md", "guide/claims.md", "results.json",
    ]  # fmt: skip
    first, second = (json.loads(contents(clone)[f"{name}.ipynb"]) for name in ("00_a", "01_b"))
    assert first["metadata"]["labkit"] == second["metadata"]["labkit"] == {**about, "seconds": 1}
    assert first["metadata"]["language_info"] == {"version": "3.99"}
    assert (
        first["metadata"]["kernelspec"]["display_name"] == KernelSpecManager().get_kernel_spec("python3").display_name
    )
    shown, plotted = second["cells"][1]["outputs"]
    assert (shown["name"], shown["text"]) == ("stdout", ["InstabilityWarning: pil: unstable: spread 40%\n"])
    assert plotted["data"] == {"image/png": storing.in_few_colors(plot)}
    assert (clone / "00_a.ipynb").read_text().endswith("}\n")


def test_results_are_stored_in_one_file_in_first_cells_and_in_the_readme(clone, recorded):
    beside = "**Result of this run.** One.\n\n**Stored run.** Of another day."
    outputs = {"text/markdown": beside, "text/plain": beside.replace("**", "")}
    runs = [executed(clone, "00_a", new_output("execute_result", outputs)), executed(clone, "01_b_c")]
    about = storing.describe_run("")
    storing.store_all(runs, about, recorded(*runs))
    assert (clone / "guide/claims.md").read_text().startswith("# Published claims\n")
    assert (clone / "guide/bottleneck.md").read_text() == GAINS.replace("99.9", "3")
    stored = json.loads((clone / "results.json").read_text())
    assert stored.items() >= about.items()
    assert list(stored["notebooks"]) == ["00_a", "01_b_c"]
    assert stored["notebooks"]["00_a"]["figures"] == {"one worker per core over none": [3.0, 2.5, 3.5]}
    cells = nbformat.read(clone / "00_a.ipynb", as_version=4).cells
    said = "**Result.** 00_a is **2.5 times** as fast; more on others. And more. *(a box)*"
    assert cells[0].source == FIRST.replace("**Result.** (to be stored)", said)
    assert [text.replace("**", "") for text in cells[1].outputs[0].data.values()] == ["Result of this run. One."] * 2
    assert (clone.parent / "README.md").read_text() == (
        "# x\n\n| notebook | answer here (yours will differ) |\n|---|---|\n"
        "| [00_a](notebooks/00_a.ipynb) | 00_a is **2.5 times** as fast. |\n"
        "| [01_b_c](notebooks/01_b_c.ipynb) | 01_b_c is **2.5 times** as fast. |\n\nMore.\n"
    )


def test_a_plot_in_few_colors_is_the_same_plot_in_fewer_bytes():
    figure = Figure()
    figure.add_subplot().plot([1, 2, 3], color="firebrick")
    png = png_base64(figure)
    few = storing.in_few_colors(png)
    before, after = (np.asarray(Image.open(BytesIO(b64decode(one))).convert("RGB"), int) for one in (png, few))
    assert len(few) < len(png)
    assert np.abs(before - after).mean() < 1


@pytest.mark.parametrize("lacking", ["a result", "a place", "a table"])
def test_a_notebook_without_a_result_or_a_place_for_it_is_not_stored(clone, recorded, lacking):
    run = executed(clone, "00_a")
    frames = recorded(*[run] * (lacking != "a result"))
    if lacking == "a place":
        run.node.cells[0].source = "# A"
    if lacking == "a table":
        (clone.parent / "README.md").write_text("# x")
    before = contents(clone.parent)
    told = {"a result": "no results of 00_a", "a place": r"00_a has no paragraph .*Result", "a table": "has no table"}
    with pytest.raises(ValueError, match=told[lacking]):
        storing.store_all([run], storing.describe_run(""), frames)
    assert contents(clone.parent) == before


def test_a_commit_that_changes_during_the_run_is_dirty(clone, recorded):
    about, run = storing.describe_run(""), executed(clone, "00_a")
    git(clone, "commit", "--allow-empty", "-m", "second")
    storing.store_all([run], about, recorded(run))
    stored = json.loads((clone / "00_a.ipynb").read_text())["metadata"]["labkit"]
    assert stored == {**about, "commit": f"{about['commit']}-dirty", "seconds": 1}


def test_the_ladders_frame_and_figure_are_stored_with_the_notebooks(clone, recorded, frame_of):
    (clone / "guide" / "bottleneck.md").write_text("No figure.\n")
    rates = {"batches in memory, training": [9, 9]}
    for name, rate in {"naive": 1, "quick": 2}.items():
        rates |= {f"{name}, {what}": [rate, 1.1 * rate] for what in ("loader alone", "training")}
    runs = frame_of(rates, "naive, training", experiment=ladder.EXPERIMENT, photos="p", step="s")
    run = executed(clone, ladder.NOTEBOOK)
    frame = save_frame(runs, recorded(run) / ladder.FRAME)
    storing.store_all([run], storing.describe_run(""), frame.parent)
    assert (clone / ladder.FRAME).read_bytes() == frame.read_bytes()
    with Image.open(clone / ladder.FIGURE) as image:
        assert image.width > 600


def test_where_to_start_is_stored_with_the_gains_of_the_whole_run(clone, recorded):
    runs = [executed(clone, "00_a"), executed(clone, "03_persistent_workers")]
    runs[0].node.cells.append(new_code_cell("course.where_to_start()"))
    storing.store_all(runs, storing.describe_run(""), recorded(*runs))
    [shown] = nbformat.read(clone / "00_a.ipynb", as_version=4).cells[-1].outputs
    assert "3x [2.5, 3.5], one worker per core over none" in shown["data"]["text/markdown"]


@pytest.mark.parametrize("reason", ["no ladder was recorded", "a file cannot be written"])
def test_nothing_is_stored_if_one_file_cannot_be(clone, recorded, reason):
    before = contents(clone.parent)
    (clone / "no folder").touch()
    last = ladder.NOTEBOOK if reason == "no ladder was recorded" else "no folder/01_b"
    runs = [executed(clone, "00_a"), executed(clone, last)]
    about, frames = storing.describe_run(""), recorded(*runs)
    with pytest.raises(OSError, match=ladder.FRAME if last == ladder.NOTEBOOK else "no folder"):
        storing.store_all(runs, about, frames)
    (clone / "no folder").unlink()
    assert contents(clone.parent) == before


@pytest.mark.parametrize(("notebook", "figure"), [("00_a", "another"), ("09_gone", "one worker per core over none")])
def test_a_figure_that_no_notebook_has_is_told(notebook, figure):
    found = Result("00_a", ("It is.",), (), FIGURES, "a box", "laptop")
    with pytest.raises(ValueError, match=f"the guide shows '{figure}' of {notebook}, which has no such figure"):
        storing.with_figures(f"**1**<!-- {notebook}: {figure} -->", {"00_a": found})
