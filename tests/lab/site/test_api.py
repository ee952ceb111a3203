"""The API reference: its list of names, and docstrings as reStructuredText."""

import inspect
import sys

import pytest

import labkit as lk
from labkit.lab.site import api


def test_the_names_are_those_of_the_package():
    names = [name for modules in api.public_names().values() for name in modules]
    assert sorted(names) == sorted(lk.__all__)


def test_a_name_is_in_the_room_that_defines_it():
    rooms = api.public_names()
    assert rooms["measure"]["compare"] == "labkit.measure.timing"
    assert set(rooms) == {"core", "data", "measure", "peers", "pipeline", "teach", "tuning"}


@pytest.mark.parametrize(
    ("line", "becomes"),
    [
        ("See `make_loader`.", "See :py:obj:`make_loader <lk.make_loader>`."),
        ("See `lk.compare`.", "See :py:obj:`compare <lk.compare>`."),
        ("Two `DataLoader`s", r"Two ``DataLoader``\ s"),
        ('`"train"` or ``x``', '``"train"`` or ``x``'),
        ("Taught in: notebooks/02_read_image.ipynb", "Taught in: :doc:`02_read_image </notebooks/02_read_image>`"),
        ("Taught in: notebooks/03_persistent_workers.ipynb", "Taught in: ``03_persistent_workers``"),
    ],
)
def test_docstrings_become_rst(line, becomes):
    lines = [line]
    api.rewrite_docstring(None, "function", "x", None, None, lines, notebooks=frozenset({"02_read_image"}))
    assert lines == [becomes]


def test_lk_is_a_module_only_meanwhile():
    with api.documented_as_lk():
        import lk as alias

        assert alias is lk
    assert "lk" not in sys.modules


def test_autodoc_leaves_no_trace_in_functions():
    before = inspect.signature(lk.plan)
    with api.documented_as_lk():
        lk.plan.__signature__ = inspect.Signature()
    assert inspect.signature(lk.plan) == before
    assert api.ALIAS not in sys.modules
