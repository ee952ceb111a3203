"""Exercises: a check passes right answers, says what is wrong with others, and never raises; the notebooks' own."""

import re
import sys
from collections import Counter
from functools import partial
from types import ModuleType

import nbformat
import numpy as np
import pandas as pd
import pytest
import torch

import labkit as lk
from labkit import course
from tests.paths import REPO


def judge(double):
    if double(2) != 4:  # not assert, to which pytest adds
        raise AssertionError(f"twice 2 is not {double(2)}")


@pytest.mark.parametrize(
    ("answer", "expected", "told"),
    [
        (3, 3, "right\n"),
        (3.03, 3.0, "right\n"),
        (1000, 1001, "not yet: 1000 is not 1001\n"),  # whole numbers: exactly
        ("3", 3.0, "not yet: '3' is not 3.0\n"),
        ("a", "a", "right\n"),
        (True, False, "not yet: True is not False\n"),
        ((1, 2.001), (1, 2.0), "right\n"),
        ((1,), (1, 2), "not yet: (1,) is not (1, 2)\n"),
        (np.arange(3.0), np.arange(3.0) * 1.001, "right\n"),
        (torch.zeros(2), np.zeros(2), "right\n"),
        (np.zeros((1, 2)), np.zeros(2), "not yet: array([[0., 0.]]) is not array([0., 0.])\n"),
        (None, 3.0, "not yet: None is not 3.0\n"),
        (lambda n: n + n, judge, "right\n"),
        (lambda n: n + 1, judge, "not yet: twice 2 is not 3\n"),
        (lambda n: n / 0, judge, "not yet: the answer raised ZeroDivisionError: division by zero\n"),
    ],
)
def test_an_answer_is_right_or_the_check_says_what_is_wrong(said, answer, expected, told):
    assert said(answer, expected) == told


def area(width, height):
    return width * height


def test_a_function_is_tried_on_cases_of_one_argument_or_several(said):
    assert said(area, {(2, 3): 6, (1, 1): 1}) == "right\n"
    assert said(area, {(2, 3): 6, (1, 1): 2}) == "not yet: area(1, 1) gave 1; 2 is right\n"
    assert said(abs, {-2: 2}) == "right\n"


class Area:
    def __call__(self, width, height):
        return width * height + 0


def test_a_function_may_be_any_object_that_can_be_called(said):
    for answer, name in ((Area(), "Area"), (partial(area), "area"), (partial(area, height=2), "area")):
        cases = {(2,): 4} if getattr(answer, "keywords", None) else {(2, 2): 4}
        assert said(answer, cases) == "right\n"
        assert said(answer, dict.fromkeys(cases, 5)).startswith(f"not yet: {name}(2")


@pytest.mark.parametrize("expected", [{(2, 3): 6}, lambda answer: answer(2, 3)])
@pytest.mark.parametrize("answer", [7, None])
def test_an_answer_that_is_no_function_is_told_so_without_the_solution(said, answer, expected):
    told = f"not yet: the answer has to be a function, and {answer!r} is a {type(answer).__name__}\n"
    assert said(answer, expected) == told


@pytest.mark.parametrize("answer", [..., lambda *_: ...])
@pytest.mark.parametrize("expected", [{2: 4}, judge, 4])
def test_what_is_not_answered_prints_nothing(said, answer, expected):
    if answer is ... or expected != 4:
        assert said(answer, expected) == ""


def test_a_judge_may_catch_errors_of_the_answer_but_no_missing_one(said):
    def forgiving(answer):
        try:
            answer(1)
        except Exception as error:
            raise AssertionError("it was caught") from error

    assert said(lambda n: n / 0, forgiving) == "not yet: it was caught\n"
    assert said(lambda n: ..., forgiving) == ""


STEADY = {"a": [100, 101, 99, 100, 100], "b": [200, 202, 199, 200, 201]}


@pytest.mark.parametrize(
    ("rates", "options", "told"),
    [
        (STEADY, {"rounds": 5, "widest": 0.3, "speedup": 1.5}, "right"),
        (STEADY, {"rounds": 6}, "it has 5 measured rounds; at least 6 are needed"),
        (STEADY, {"speedup": 3}, r"the fastest conclusive variant reaches 2\.0\dx; at least 3x is needed"),
        (STEADY, {"widest": 0.001}, "the narrowest interval is .*: measure longer"),
        ({"a": STEADY["a"]}, {}, "it has only the baseline; add a variant to compare it with"),
        ({"a": STEADY["a"], "b": STEADY["a"][::-1]}, {}, "every variant is inconclusive: measure longer"),
    ],
)
def test_own_runs_have_to_support_a_conclusion(said, frame_of, rates, options, told):
    assert re.search(told, said(frame_of(rates, "a"), course.own_runs(**options)))


def test_own_runs_are_a_frame_and_no_experiment_of_a_notebook(said, frame_of):
    assert said([1], course.own_runs()) == "not yet: a list is not a frame from lk.compare\n"
    assert "a DataFrame is not a frame" in said(pd.DataFrame({"x": [1]}), course.own_runs())
    assert "this is a summary" in said(lk.summarize(frame_of(STEADY, "a")), course.own_runs())
    lacking = frame_of(STEADY, "a").drop(columns="experiment")
    assert "a DataFrame is not a frame" in said(lacking, course.own_runs())
    ours = frame_of(STEADY, "a", experiment="03 workers")
    assert "an experiment of the notebook; run one of your own" in said(ours, course.own_runs())


def exercises():
    """Number -> imports of the notebook, folded answer, the cell of a module, and the cell with skeleton and check."""
    for path in sorted((REPO / "notebooks").glob("*.ipynb")):
        cells = nbformat.read(path, as_version=4).cells
        imports = next(cell.source for cell in cells if cell.cell_type == "code")
        for number, cell in enumerate(cells):
            if cell.cell_type == "code" and "course.check(" in cell.source:
                before = cells[number - 1]
                module = before.source if "%%writefile" in before.source else None
                task = cells[number - 2].source if module else before.source
                name = re.search(r"\*\*(\d\d[a-z]?\.\d)\*\*", task)
                assert name, f"{path.name}: no number before {cell.source!r}"
                yield name[1], imports, task, module, cell.source


EXERCISES = {name: parts for name, *parts in exercises()}


@pytest.mark.parametrize("name", EXERCISES)
def test_each_folded_answer_is_right_and_its_skeleton_says_nothing(name, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(REPO / "notebooks")  # train.py
    monkeypatch.syspath_prepend(tmp_path)
    notebook = ModuleType("notebook")  # as `__main__` of a kernel: what is defined in it can be pickled
    monkeypatch.setitem(sys.modules, "notebook", notebook)
    imports, task, module, cell = EXERCISES[name]
    folded = re.search(r"<details><summary>Answer</summary>\n\n(.*)\n\n</details>", task, re.DOTALL)
    assert folded, "no folded answer"
    skeleton, check = cell[: cell.index("course.check(")], cell[cell.index("course.check(") :]
    space = vars(notebook)
    exec(imports, space)  # noqa: S102 - our own notebooks
    if module:
        magic, skeleton_file = module.split("%%writefile ")[1].split("\n", 1)
        path = tmp_path / magic.rpartition("/")[2]
        path.write_text(skeleton_file)
    exec(skeleton + check, space)  # noqa: S102
    assert capsys.readouterr().out == ""
    code = re.search(r"```python\n(.*)\n```", folded[1], re.DOTALL)
    if code is None:  # an experiment of one's own
        assert "course.own_runs(" in check
        return
    if module:
        path.write_text(code[1])
        exec(cell, space)  # noqa: S102
    else:
        exec(f"{skeleton}\n{code[1]}\n{check}", space)  # noqa: S102
    assert capsys.readouterr().out == "right\n"


def test_each_notebook_has_one_to_three():
    numbers = [path.stem.split("_")[0] for path in (REPO / "notebooks").glob("*.ipynb")]
    found = Counter(name.split(".")[0] for name in EXERCISES)
    assert {number: found[number] for number in numbers if found[number] not in (1, 2, 3)} == {}
