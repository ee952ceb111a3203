"""The checklist of steps: gains of this machine's runs, ranked beside the write-ups' order."""

import numpy as np
import pandas as pd
import pytest

from labkit.course.ledger import _STEPS, checklist
from labkit.measure.recorder import RESULTS_VARIABLE


@pytest.fixture(autouse=True)
def _nothing_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv(RESULTS_VARIABLE, str(tmp_path / "none"))


def _runs(frame_of, experiment, **rates):
    wobble = np.array([0.99, 1.0, 1.01])
    rates = {label.replace("_", " "): list(rate * wobble) for label, rate in rates.items()}
    return frame_of(rates, next(iter(rates)), experiment=experiment, device="cpu")


def test_measured_gains_are_ranked_and_the_rest_is_left_open(frame_of):
    decoders = _runs(frame_of, "02 decoders, imagenet", pil=100, torchvision=120)
    formats = _runs(frame_of, "11 formats", JPEG_folder=100, JPEG_at_256=300)
    on_cpu = _runs(frame_of, "07 feeding a training step", pinned=100, prefetched=900)
    table = checklist(runs=[decoders, formats, on_cpu]).set_index("step")
    assert list(table["place"]) == list(range(1, len(_STEPS) + 1))
    assert dict(table["place_by_gain"].dropna()) == {"read_image": 2, "resize once": 1}
    assert table["measured"].dropna().to_dict() == pytest.approx({"read_image": 1.2, "resize once": 3.0}, rel=0.02)
    assert list(table.loc["resize once", ["ci_low", "ci_high"]]) == pytest.approx([3, 3], rel=0.02)


def test_a_step_on_the_gpu_counts_runs_on_a_gpu_only(frame_of):
    runs = _runs(frame_of, "07 feeding a training step", pinned=100, prefetched=150)
    assert pd.isna(checklist(runs=[runs])["measured"]).all()
    measured = checklist(runs=[runs.assign(device="cuda")]).set_index("step")["measured"].dropna()
    assert dict(measured) == pytest.approx({"prefetch to the GPU": 1.5})


def test_without_frames_no_step_has_a_gain():
    table = checklist()
    assert table["measured"].isna().all()
    assert table["place_by_gain"].isna().all()
