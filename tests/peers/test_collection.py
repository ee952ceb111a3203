"""One CSV of comparisons: what is added, what is replaced, and what is refused."""

import nbformat
import pandas as pd
import pytest

from labkit.measure.frames import MEASURE_VERSION, load_frame, make_frame, save_frame
from labkit.peers.peer import CLASSES
from labkit.peers.run import append_runs, comparisons, stored_runs
from tests.paths import REPO


def runs(name="raw-uint8", machine="here", rate=100.0):
    rows = [
        {
            "variant": label,
            "round": number,
            "is_warmup": number == 0,
            "images_per_s": rate,
            "n_images": 64,
            "cpu_s": 1.0,
        }
        for number in range(3)
        for label in ("naive PIL", "ours")
    ]
    return make_frame(rows, baseline="naive PIL", peer_class=name).assign(env_id=machine)


def test_comparisons_of_other_classes_and_machines_stay(tmp_path):
    path = tmp_path / "peers.csv"
    append_runs(runs(), path)
    append_runs(runs(machine="there", rate=300.0), path)
    found = append_runs(runs("jpeg-uint8"), path)
    pd.testing.assert_frame_equal(load_frame(path), load_frame(save_frame(found, tmp_path / "same.csv")))
    assert [(machine, name, len(own)) for machine, name, own in comparisons(load_frame(path))] == [
        ("here", "raw-uint8", 6), ("there", "raw-uint8", 6), ("here", "jpeg-uint8", 6),
    ]  # fmt: skip
    assert found["run"].nunique() == 3
    assert (found["measure"] == MEASURE_VERSION).all()


def test_a_rerun_replaces_the_same_class_on_the_same_machine_only(tmp_path):
    path = tmp_path / "peers.csv"
    for frame in (runs(), runs(machine="there"), runs(rate=200.0)):
        append_runs(frame, path)
    rates = {(machine, name): set(own["images_per_s"]) for machine, name, own in comparisons(load_frame(path))}
    assert rates == {("there", "raw-uint8"): {100.0}, ("here", "raw-uint8"): {200.0}}


def test_figures_of_another_meaning_are_refused_and_left_alone(tmp_path):
    path = tmp_path / "peers.csv"
    save_frame(runs().assign(run="old", measure=MEASURE_VERSION - 1), path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=rf"peers\.csv.*measure \[{MEASURE_VERSION - 1}\].*run all classes again"):
        append_runs(runs(), path)
    assert path.read_bytes() == before


def test_the_stored_collection_is_of_the_machine_and_the_meaning_of_the_stored_notebooks():
    stored, notebook = stored_runs(), nbformat.read(REPO / "notebooks/13_peers.ipynb", 4)
    assert set(stored["peer_class"]) == set(CLASSES)
    assert set(stored["env_id"]) == {notebook.metadata["labkit"]["env_id"]}
    assert stored["run"].nunique() == len(CLASSES)
    assert (stored["batch_size"].dropna() == 64).all()
    assert stored.loc[~stored["is_warmup"], "is_steady"].all()


def test_another_table_is_refused(tmp_path):
    path = save_frame(runs(), tmp_path / "runs.csv")
    with pytest.raises(ValueError, match=r"runs\.csv is no collection"):
        append_runs(runs(), path)
