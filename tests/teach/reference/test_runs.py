"""Stored reference runs: what is shown, and files that are refused."""

import json

import matplotlib.pyplot as plt
import pytest

from labkit import course
from labkit.course.reference import COMMAND, reference_runs
from labkit.measure.frames import save_frame


@pytest.fixture
def stored(frame_of, tmp_path):
    """Stores a pair of files as a CUDA machine would have, under `name`."""

    def write(name, gpu="NVIDIA Test 9000", experiment="07 feeding a training step"):
        rates = {"pageable": [100, 101, 99], "prefetched": [150, 151, 149]}
        frame = frame_of(rates, "pageable", experiment=experiment, env_id=name)
        save_frame(frame, tmp_path / f"{name}.csv")
        (tmp_path / f"{name}.json").write_text(json.dumps({"environment": {"gpu": gpu, "cpu": "Test CPU"}}))
        return frame

    write.folder = tmp_path
    return write


def test_where_nothing_is_stored_the_command_is_named(tmp_path, stored, capsys):
    course.show_reference("07 feeding a training step", folder=tmp_path)
    assert "No reference run of '07 feeding a training step' is stored: nobody has" in capsys.readouterr().out
    stored("a", experiment="06 another")
    course.show_reference("07 feeding a training step", folder=tmp_path)
    assert COMMAND in capsys.readouterr().out
    assert plt.get_fignums() == []


def test_a_stored_run_is_plotted_with_its_machine(stored, capsys):
    frame = stored("a")
    course.show_reference("07 feeding a training step", folder=stored.folder)
    ax = plt.gca()
    title = " ".join(ax.get_title("left").split())
    assert title.startswith("07 feeding a training step: reference run on NVIDIA Test 9000: ")
    assert [label.get_text() for label in ax.get_yticklabels()] == ["prefetched"]
    assert capsys.readouterr().out == ""
    runs = reference_runs("07 feeding a training step", stored.folder)["NVIDIA Test 9000"]
    assert list(runs.images_per_s) == list(frame.images_per_s)


def test_two_machines_with_the_same_gpu_are_both_shown(stored):
    stored("a")
    stored("b")
    stored("c", gpu="NVIDIA Test 1")
    found = reference_runs("07 feeding a training step", stored.folder)
    assert list(found) == ["NVIDIA Test 9000", "NVIDIA Test 9000 (b)", "NVIDIA Test 1"]
    assert [set(runs.env_id) for runs in found.values()] == [{"a"}, {"b"}, {"c"}]
    course.show_reference("07 feeding a training step", folder=stored.folder)
    assert len(plt.get_fignums()) == 3


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"environment": {}}', '{"environment": {"gpu": '])
def test_runs_without_a_machine_are_refused_by_name(stored, text):
    stored("a")
    path = stored.folder / "a.json"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(ValueError, match=r"a\.json does not name the machine.*python -m labkit reference"):
        reference_runs("07 feeding a training step", stored.folder)


def test_a_damaged_csv_is_refused_by_name(stored):
    stored("a")
    (stored.folder / "a.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"a\.csv is not a frame of runs"):
        reference_runs("07 feeding a training step", stored.folder)
