"""`where_to_start` names what there is, and reads its gains from frames."""

import re

import numpy as np
import pandas as pd
import pytest

from labkit import course
from labkit.course import starting as start
from labkit.course.ledger import _STEPS, checklist
from labkit.measure.frames import save_frame
from labkit.measure.recorder import RESULTS_VARIABLE
from labkit.util.machine import NOTEBOOK_FOLDER


@pytest.fixture(autouse=True)
def own_frames(tmp_path, monkeypatch):
    """Nothing is recorded here; what is stored lies in a folder of the test's own."""
    monkeypatch.setenv(RESULTS_VARIABLE, str(tmp_path / "none"))
    monkeypatch.setattr(start, "NOTEBOOK_FOLDER", tmp_path)


def row(table, call):
    return table.frame.set_index("call").loc[call]


def test_the_stored_table_names_calls_and_notebooks_that_there_are(monkeypatch):
    monkeypatch.setattr(start, "NOTEBOOK_FOLDER", NOTEBOOK_FOLDER)
    frame = course.where_to_start().frame
    assert len(frame) > 5
    assert (frame["ci_low"] > 1).all()
    for change in frame.itertuples():
        text = (NOTEBOOK_FOLDER / f"{change.notebook}.ipynb").read_text()
        assert re.search(rf"\b{change.call.removeprefix('lk.')}\b", text), change.call


def test_a_gain_is_read_from_this_machines_runs(runs_of):
    runs = runs_of("02 decoders, imagenet", turbojpeg=2.5).replace({"base": "pil"})
    found = row(course.where_to_start(runs=[runs]), "lk.ImageDataset")
    assert found.gain == pytest.approx(2.5, rel=0.02)
    assert found.ci_low <= 2.5 <= found.ci_high
    assert (found.n_runs, found.origin, found.waits_for) == (5, "this machine", "decode")


def test_the_stored_run_stands_in_and_is_named(runs_of, tmp_path):
    stored = runs_of("02 decoders, imagenet", turbojpeg=3).replace({"base": "pil"}).assign(env_id="their-box")
    save_frame(stored, tmp_path / start.FRAME)
    found = row(course.where_to_start(), "lk.ImageDataset")
    assert found.origin == "stored run on their-box"
    assert found.gain == pytest.approx(3, rel=0.02)
    own = runs_of("02 decoders, imagenet", turbojpeg=2).replace({"base": "pil"})
    assert row(course.where_to_start(runs=[own]), "lk.ImageDataset").gain == pytest.approx(2, rel=0.02)


def test_only_what_is_certainly_faster_has_a_row(runs_of):
    def table(ratio):
        return course.where_to_start(
            runs=[runs_of("03 workers", **{"one per core": ratio}).replace({"base": "no worker"})]
        )

    assert course.where_to_start().frame.empty
    assert table(1.0).frame.empty
    assert table(0.5).frame.empty
    assert table(2.0).frame["call"].tolist() == ["lk.make_loader"]


def test_a_gain_on_the_gpu_needs_runs_there(runs_of):
    runs = runs_of("07 feeding a training step", prefetched=1.5).replace({"base": "pinned"})
    assert course.where_to_start(runs=[runs.assign(device="cpu")]).frame.empty
    found = row(course.where_to_start(runs=[runs.assign(device="cuda")]), "lk.CUDAPrefetcher")
    assert (round(found.gain, 1), found.origin) == (1.5, "this machine")


def test_runs_of_another_machine_are_refused(runs_of):
    with pytest.raises(ValueError, match="runs of elsewhere cannot be judged here"):
        course.where_to_start(runs=[runs_of("03 workers", many=2).assign(env_id="elsewhere")])


def test_what_is_stored_gives_the_same_gains(runs_of, tmp_path):
    frames = [runs_of("02 decoders, imagenet", turbojpeg=3, cv2=2).replace({"base": "pil"}), runs_of("x", a=2)]
    rows = start.runs_behind(frames)
    assert set(rows["variant"]) == {"pil", "turbojpeg"}
    save_frame(rows, tmp_path / start.FRAME)
    own, stored = course.where_to_start(runs=frames).frame, course.where_to_start().frame
    assert len(own) == 1
    pd.testing.assert_series_equal(own["gain"], stored["gain"])
    assert start.runs_behind([frames[1]]) is None


def test_it_prints_a_table_and_shows_links_and_doubts(runs_of):
    runs = runs_of("03 workers", **{"one per core": 2}).replace({"base": "no worker"}).assign(scale="ci")
    table = course.where_to_start(runs=[runs])
    assert re.search(r"decode +lk\.make_loader: .*workers over none: 2\.00x \[[\d.]+, [\d.]+\], this", str(table))
    assert "in doubt: ci scale is a rehearsal" in str(table)
    assert "[03_persistent_workers](03_persistent_workers.ipynb) |" in table._repr_markdown_()
    assert "03_persistent_workers</td>" in table.to_html(pages=["01_naive_pil"])
    assert '<a href="03_persistent_workers.html">03' in table.to_html(pages=["03_persistent_workers"])


def test_the_checklist_comes_to_each_part_in_its_place(runs_of):
    runs = [runs_of("02 decoders, imagenet", turbojpeg=3, torchvision=1.2).replace({"base": "pil"})]
    table = course.where_to_start(runs=runs).judge(checklist(runs=runs))
    steps = [step.name for step in _STEPS]
    assert table["place"].dropna().tolist() == [steps.index(name) + 1 for name in table["first_step"] if name]
    assert table.loc["decode", ["first_step", "best_call"]].tolist() == ["read_image", "lk.ImageDataset"]
    assert table.loc["decode", ["measured", "best_gain"]].tolist() == pytest.approx([1.2, 3], rel=0.02)
    assert f"step {table.loc['read', 'place']} for read" in table.attrs["sentence"]


def test_an_order_without_steps_of_a_part_says_so():
    steps = pd.DataFrame({"step": ["workers"], "place": [1], "measured": [np.nan]})
    table = course.where_to_start().judge(steps)
    assert table["place"].count() == 1
    assert "No step is for a training that waits for" in table.attrs["sentence"]
    assert "read" in table.attrs["sentence"].partition("waits for")[2]
