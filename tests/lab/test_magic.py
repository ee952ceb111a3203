"""%%variant in a real IPython shell."""

import pytest
from IPython.core.error import UsageError
from IPython.testing.globalipapp import start_ipython

import labkit as lk
from labkit.errors import VariantError


@pytest.fixture
def shell():
    shell = start_ipython() or get_ipython()  # noqa: F821 - the one shell of this process
    shell.run_line_magic("load_ext", "labkit")
    shell.user_ns.pop("runs", None)
    return shell


@pytest.mark.slow
def test_cells_become_variants_of_one_frame(shell, capsys):
    shell.run_cell_magic("variant", "'a b' -n 10 -r 3", "x = sum(range(1000))")
    shell.run_cell_magic("variant", "c --images 20 --rounds 2 --warmups 0", "y = 2")
    runs = shell.user_ns["runs"]
    assert runs.groupby("variant").size().to_dict() == {"a b": 4, "c": 2}
    assert set(runs.baseline) == {"a b"}
    assert runs.groupby("variant").n_images.first().to_dict() == {"a b": 10, "c": 20}
    assert shell.user_ns["x"] == 499500
    assert "not interleaved" in lk.summarize(runs).loc["c", "note"]
    assert "a b: median" in capsys.readouterr().out


@pytest.mark.slow
def test_a_label_again_replaces_its_runs_and_the_first_stays_the_baseline(shell):
    for label, rounds in (("a", 2), ("b", 2), ("a", 3)):
        shell.run_cell_magic("variant", f"{label} -n 1 -r {rounds} -w 0", "pass")
    runs = shell.user_ns["runs"]
    assert set(runs.baseline) == {"a"}
    assert list(runs.variant) == ["a", "a", "a", "b", "b"]


def test_magics_inside_the_cell_work(shell):
    shell.run_cell_magic("variant", "a -n 1 -r 1 -w 0 --into mine", "%env LABKIT_TEST=1\nz = 5")
    assert shell.user_ns["z"] == 5
    assert len(shell.user_ns["mine"]) == 1


def test_mistakes_are_usage_errors(shell):
    with pytest.raises(UsageError, match="images"):
        shell.run_cell_magic("variant", "a", "pass")
    shell.user_ns["runs"] = 3
    with pytest.raises(UsageError, match="holds a int, not a frame"):
        shell.run_cell_magic("variant", "a -n 1", "pass")


def test_an_error_in_the_cell_names_the_variant(shell):
    with pytest.raises(VariantError, match="variant 'a' raised ZeroDivisionError"):
        shell.run_cell_magic("variant", "a -n 1", "1 / 0")
