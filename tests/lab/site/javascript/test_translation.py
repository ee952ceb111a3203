"""Python as JavaScript: what is translated gives the same in both, and what is not known is refused by name."""

import json
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from labkit.lab.site.javascript import Translation, Untranslatable
from tests.lab.site.engine import Engine

FACTORS = {"a": 2.0, "b": 3.0}


def scaled(factor):
    def make(value):
        return value * factor

    return make


MADE = {"twice": scaled(2), "plain": scaled(1)}


def arithmetic(x, y=None, **others):
    """Numbers, None, and what is folded into one."""
    first = (x**2 - 3 * x) / 2
    first += 1
    low, high = (first, np.maximum(first, 4))
    return [np.minimum.reduce([low, high, *(each for each in (x, y) if each is not None)]), -high, 7 % 4, len(others)]


def loops(values, limit=10):
    """Lists, dicts and sets."""
    total, found = 0, {}
    for number, value in enumerate(values):
        found[f"n{number}"] = value
        total += value
    while (half := total / 2) > limit:
        total = half
    kept = {name: value for name, value in found.items() if value > 0 and name not in {"n1"}}
    pairs = sorted([(name, value + 1) for name, value in kept.items()], key=lambda pair: (-pair[1], pair[0]))
    return [total, pairs, dict(pairs) | {"n1": 1}, next((name for name in found if name == "none"), None)]


def closures(x, name="twice"):
    make = MADE.get(name, MADE["plain"])
    return make(x) * FACTORS["b"] if x else "nothing"


def texts(value, name):
    if name == "":
        raise ValueError(f"no name for {value:.2f}")
    return f"{name!r}: {value:,.0f} {value:.3g} {value:.0%} {value:g}" + " {:,.0f} GB".format(value).strip()  # noqa: UP032


@dataclass(frozen=True)
class Box:
    """A dataclass."""

    side: float
    names: list = field(default_factory=list)

    @cached_property
    def area(self):
        return self.side**2

    @property
    def is_big(self):
        return not self.area <= 4

    def grown(self, by):
        return replace(self, side=self.side + by)

    def __str__(self):
        return f"a box of {self.area:g}"


def boxes(side):
    box = Box(side, names=["one"]).grown(1)
    return [box.area, box.is_big, box.names, f"{box}", isinstance(box, Box), isinstance(side, Box)]


def call_by_name(x):
    return arithmetic(x, other=1, **{"another": 2})


ALL = (arithmetic, loops, closures, texts, boxes, call_by_name)


@pytest.fixture(scope="module")
def engine():
    program = Translation(package="tests")
    for function in ALL:
        program.add(function.__name__, function)
    return Engine(program.text())


class TestTheSame:
    @pytest.mark.parametrize(
        ("function", "arguments"),
        [
            (arithmetic, [3.5]), (arithmetic, [3.5, -20]), (call_by_name, [2]), (loops, [[4, 50, 6, 0]]),
            (loops, [[1], 1]), (closures, [2]), (closures, [2, "plain"]), (closures, [0]), (closures, [2, "unknown"]),
            (texts, [57234.5, "it"]), (texts, [0.000012345, "it"]), (boxes, [1]), (boxes, [2.5]),
        ],
    )  # fmt: skip
    def test_values(self, engine, function, arguments):
        expected = json.loads(json.dumps(function(*arguments)))
        assert engine.call(function.__name__, *arguments) == expected

    def test_errors(self, engine):
        with pytest.raises(ValueError, match=r"^no name for 0.12$"):  # a half becomes even
            engine.call("texts", 0.125, "")

    @given(st.floats(1e-6, 1e15) | st.integers(0, 10**6) | st.sampled_from([0.5, 1.5, 2.5, 112_500, 0.125, 999.5]))
    @settings(max_examples=200, deadline=None)
    def test_formats(self, engine, value):
        formats = ["", ",", ",.0f", ".0f", ".2f", ".0%", "g", ".3g", ",.10g"][2 * isinstance(value, float) :]
        expected = [format(value, each) for each in formats]
        found = engine.run(f"{json.dumps(formats)}.map((each) => py.format({json.dumps(value)}, each))")
        assert found == expected

    @given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 1))
    @settings(max_examples=50, deadline=None)
    def test_quantiles(self, engine, values, share):
        found = engine.run(f"py.quantile(Float64Array.from({json.dumps(values)}), {share!r})")
        assert found == pytest.approx(np.quantile(values, share), rel=1e-12, abs=1e-9)


def power(x):
    return x**3


def exponential(x):
    return np.exp(x)


def sliced(x):
    return x[1:]


def chained(x):
    return 0 < x < 1


def printed(x):
    with open(x) as file:
        return file


def method(x):
    return x.cumsum()


def unknown(x):
    return undefined_name(x)  # noqa: F821


def keyword(x):
    return np.ceil(x, out=x)


def formatted(x):
    return f"{x:.7f}"


def word(function):
    return function


def raised(x):
    raise KeyError(x)


def tried(x):
    try:
        return x
    except ValueError:
        return 0


def foreign(x):
    return json.dumps(x)


class TestRefused:
    @pytest.mark.parametrize(
        ("function", "says"),
        [
            (power, r"power, line 2: a power other than 2 is not known: x \*\* 3"),
            (exponential, "the function np.exp"), (sliced, "a slice"), (chained, "a chain of comparisons"), 
            (printed, "With is not known"),
            (method, "the method cumsum"), (unknown, "the name undefined_name|the function undefined_name"),
            (keyword, "the argument out"), (formatted, "the format '.7f'"), (word, "function, a word of JavaScript"),
            (raised, "raising anything but ValueError"), (tried, "Try is not known"),
            (foreign, "the function json.dumps"),
        ],
    )  # fmt: skip
    def test_what_is_not_known(self, function, says):
        with pytest.raises(Untranslatable, match=says) as caught:
            Translation(package="tests").add(function.__name__, function)
        assert f"{__name__}.{function.__name__}" in str(caught.value)

    def test_two_objects_of_one_name(self):
        program = Translation(package="tests")
        program.add("x", 1)
        with pytest.raises(Untranslatable, match="two different objects are named x"):
            program.add("x", 2)

    def test_functions_of_others(self):
        with pytest.raises(Untranslatable, match="dumps of json is not tests's"):
            Translation(package="tests").add("dumps", json.dumps)

    def test_a_member_that_is_not_known(self):
        with pytest.raises(Untranslatable, match=r"Box2.area, line 7: the operator FloorDiv"):
            Translation(package="tests").add("", Box2)
        assert "area" not in Translation(package="tests", omitted={"Box2": ["area"]}).add("", Box2)


@dataclass
class Box2:
    side: float

    @property
    def area(self):
        return self.side // 2
