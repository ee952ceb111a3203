"""LoaderConfig: settings that are changed with a warning, and only where they would do harm or nothing."""

import os
import sys
import warnings
from types import ModuleType

import pytest
import torch

import labkit as lk
from labkit.loading import torch_loader as settings
from labkit.loading.samplers import LoaderWarning
from tests.loading import Numbers, config


@pytest.fixture
def in_a_notebook(monkeypatch):
    """Where threads run besides, and Python warns of forks from 3.12 on: here, too, nothing may be said."""
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(settings, "usable_cores", lambda: 2)
    monkeypatch.setattr(settings, "core_limits", lambda: {"cpu_count": 64, "affinity": 2})


def warnings_of(make) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
    assert {(warning.category, warning.filename) for warning in caught} <= {(LoaderWarning, __file__)}
    return [str(warning.message) for warning in caught]


def test_more_workers_than_cores(two_cores, in_a_notebook):
    made = []
    [said] = warnings_of(lambda: made.append(lk.make_loader(Numbers(), lk.LoaderConfig(num_workers=5))))
    for part in ("num_workers=5", "reduced to 2", "cpu_count 64", "affinity 2", "oversubscribe=True"):
        assert part in said
    assert made[0].num_workers == 2
    assert warnings_of(lambda: list(made[0])) == []


@pytest.mark.parametrize("settings", [{}, {"num_workers": 2}, {"num_workers": 0}, {"pin_memory": False}], ids=str)
def test_no_warning_where_nothing_changes(two_cores, in_a_notebook, settings):
    assert warnings_of(lambda: list(lk.make_loader(Numbers(), lk.LoaderConfig(**settings)))) == []


def test_oversubscribed_without_a_word(in_a_notebook):
    """Not even torch's own warning, neither when made nor when iterated."""
    workers = (os.cpu_count() or 1) + 1
    made = []
    assert warnings_of(lambda: made.append(lk.make_loader(Numbers(), config(workers)))) == []
    assert made[0].num_workers == workers
    if workers < 20:
        assert warnings_of(lambda: list(made[0])) == []


def test_settings_that_need_workers():
    asked = {"persistent_workers": True, "prefetch_factor": 4, "start_method": "spawn"}
    [said] = warnings_of(lambda: list(lk.make_loader(Numbers(), config(0, **asked))))
    for part in ("num_workers=0", *(f"{name}={value!r}" for name, value in asked.items())):
        assert part in said
    assert warnings_of(lambda: lk.make_loader(Numbers(), config(0, persistent_workers=False))) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is left out without CUDA")
def test_pinned_memory_without_cuda():
    [said] = warnings_of(lambda: list(lk.make_loader(Numbers(), config(0, pin_memory=True))))
    assert "pin_memory=True is left out" in said


def test_defaults(two_cores, monkeypatch):
    loader = lk.make_loader(Numbers())
    found = loader.num_workers, loader.batch_size, loader.prefetch_factor, loader.persistent_workers
    assert found == (2, 64, 2, True)
    for ranks in ("2", "8"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert lk.make_loader(Numbers()).num_workers == 1


@pytest.mark.parametrize(
    "bad",
    [
        {"batch_size": 0}, {"batch_size": 2.0}, {"batch_size": True}, {"num_workers": -1}, {"num_workers": "2"},
        {"prefetch_factor": 0}, {"start_method": "thread"}, {"seed": 0.5}, {"seed": None}, {"batch_size": None},
    ],
    ids=str,
)  # fmt: skip
def test_bad_values(bad):
    (name, value), *_ = bad.items()
    with pytest.raises(ValueError, match=f"{name} must be .*, got {value!r}"):
        lk.LoaderConfig(**bad)
