"""Predictions, and the checks of the exercises: right answers pass, planted wrong ones fail, nothing raises."""

import io

import pytest
import torch
from PIL import Image

import labkit as lk
from labkit.measure import plots
from labkit.teach import predictions as module
from labkit.teach.exercises import exercises


@pytest.fixture(autouse=True)
def _no_predictions(monkeypatch):
    monkeypatch.setattr(plots, "guesses", {})
    monkeypatch.setattr(module, "_made", {})


def test_a_prediction_is_kept_and_replaced():
    lk.predict("a", 2, because="why not")
    assert "a: you expect 3x" in repr(lk.predict("a", 3))
    assert lk.predictions().to_dict("records") == [{"label": "a", "speedup": 3.0, "because": ""}]


@pytest.mark.parametrize("speedup", [0, -1, float("nan")])
def test_a_prediction_must_be_a_ratio(speedup):
    with pytest.raises(ValueError, match="positive ratio"):
        lk.predict("a", speedup)


def _size(data):
    return Image.open(io.BytesIO(data)).size


def _decoded_size(data):
    return Image.open(io.BytesIO(data)).convert("RGB").size


def _to_rgb(image):
    if image.dtype == torch.uint16:
        image = (image.to(torch.int32) >> 8).to(torch.uint8)
    return image[:3] if image.shape[0] >= 3 else image[:1].expand(3, -1, -1)


def _low_byte(image):
    return _to_rgb((image.to(torch.int32) & 255).to(torch.uint8))


def _white(image):
    return torch.full((3, *image.shape[1:]), 255, dtype=torch.uint8)


ANSWERS = {
    "00.1": ([640, 639.0], [76, 600, "many"]),
    "00.2": ([128], [64, 129, 32]),
    "00.3": (["inconclusive"], ["faster", "slower", None]),
    "01.1": ([1.4286, 10 / 7], [2, 1.2]),
    "01.2": ([2.5], [1.67, 60]),
    "01.3": ([_size], [_decoded_size, lambda data: _size(data)[::-1], "function", lambda data: None]),
    "02.1": ([_to_rgb], [_low_byte, _white, lambda image: image, lambda image: _to_rgb(image).flip(0), 3]),
    "02.2": ([{"cv2", "torchcodec"}, ["torchcodec", "cv2"]], [{"cv2"}, "torchcodec", {"cv2", "torchcodec", "pil"}]),
    "02.3": ([(375, 500), [375, 500]], [(500, 375), (256, 341), (188, 250), 375]),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_right_answers_pass_and_wrong_ones_fail(name, capsys):
    right, wrong = ANSWERS[name]
    for answer in right:
        lk.check(name, answer)
        assert capsys.readouterr().out == f"{name}: right\n"
    for answer in wrong:
        lk.check(name, answer)
        assert "right\n" not in capsys.readouterr().out


def _judged(name, frame, capsys):
    lk.check(name, frame)
    return capsys.readouterr().out


def test_experiments_are_judged_from_their_frame(frame_of, capsys):
    good = frame_of({"naive": [100, 101, 99, 100, 100], "mine": [130, 131, 130, 129, 130]}, "naive")
    assert _judged("00.4", good, capsys) == "00.4: right\n"
    assert _judged("01.4", good, capsys) == "01.4: right\n"
    equal = frame_of({"naive": [100, 101, 99, 100, 100], "mine": [101, 99, 100, 101, 99]}, "naive")
    assert "inconclusive" in _judged("00.4", equal, capsys)
    short = frame_of({"naive": [100, 101, 99], "mine": [130, 131, 130]}, "naive")
    assert "3 rounds count; 5 are wanted" in _judged("00.4", short, capsys)
    slower = frame_of({"naive": [100, 101, 99], "mine": [90, 91, 89]}, "naive")
    assert "1.1x is wanted" in _judged("01.4", slower, capsys)
    assert "not a frame" in _judged("00.4", 3, capsys)
    own = frame_of({"a": [100, 101, 99, 100, 100], "b": [130, 131, 130, 129, 130]}, "a", experiment="00 two workers")
    assert "of your own" in _judged("00.4", own, capsys)


def test_the_end_of_a_lead_is_judged_from_the_frame(frame_of, capsys):
    assert _judged("02.4", frame_of({"pil": [100] * 5, "turbojpeg": [105] * 5}, "pil"), capsys) == "02.4: right\n"
    assert "still leads 1.40x" in _judged("02.4", frame_of({"pil": [100] * 5, "turbojpeg": [140] * 5}, "pil"), capsys)
    assert "five are wanted" in _judged("02.4", frame_of({"pil": [100] * 2, "turbojpeg": [101] * 2}, "pil"), capsys)
    assert "variants" in _judged("02.4", frame_of({"a": [100] * 5, "b": [105] * 5}, "a"), capsys)


def test_every_exercise_has_answers_here():
    assert set(exercises()) == {*ANSWERS, "00.4", "01.4", "02.4"}


def test_no_answer_gives_the_hint_and_an_unknown_number_the_list(capsys):
    lk.check("00.1")
    assert "no answer yet. A number" in capsys.readouterr().out
    lk.check("99.9", 1)
    assert "no such exercise; there are 00.1" in capsys.readouterr().out
