"""Whoever does what an error of `labkit watch`, `diagnose` or `tune` advises gets what it promises."""

import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import labkit as lk
from labkit.watching.diagnose import made_training
from labkit.watching.diff import parse_budget
from labkit.watching.script import Script

PACKAGE = {
    "pack/__init__.py": "", "pack/part.py": "print('trains')",
    "folder/train.py": "print('trains')",
    "train.py": (
        "import torch\n"
        "def make_training():\n    return [torch.zeros(2, 3, 4, 4)] * 8, lambda batch: batch.sum()\n"
        "def wants(size):\n    return make_training()\n"
        "def only():\n    return make_training()[0]\n"
        "print('trains')\n"
    ),
}  # fmt: skip


def told(call) -> str:
    with pytest.raises(Exception) as caught:
        call()
    return str(caught.value)


def batches() -> DataLoader:
    return DataLoader(TensorDataset(torch.zeros(16, 3, 4, 4)), batch_size=2)


@pytest.fixture
def here(tmp_path, monkeypatch):
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [*sys.argv])
    monkeypatch.setattr("sys.path", [*sys.path])
    yield tmp_path
    for name in ("pack", "pack.part", "train"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("words", "advice", "instead"),
    [
        (["pack.part"], "for a module, write -m before its name", ["-m", "pack.part"]),
        (["python3", "train.py"], "write the script alone", ["train.py"]),
        (["folder"], "name the script in it that trains", ["folder/train.py"]),
        (["-m", "pack"], "name the module in it that trains", ["-m", "pack.part"]),
    ],
)
def test_a_program_is_named_as_is_said(here, words, advice, instead):
    assert advice in told(lambda: Script(words))
    done = subprocess.run([sys.executable, *instead], cwd=here, capture_output=True, text=True)
    assert done.stdout == "trains\n"
    Script(instead)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("train.py:make_training", "such as train:make_training for train.py in this folder"),
        ("train:make", "it has make_training, only, wants"),
        ("train:wants", "it must work without arguments"),
        ("train:only", "return loader, step, where step(batch) trains on a batch"),
    ],
)
def test_a_function_is_named_as_is_said(here, name, advice):
    assert advice in told(lambda: made_training(name))
    loader, step = made_training("train:make_training")
    assert lk.diagnose(loader, step, batches=4, rounds=1, limit_s=5).frame["images_per_s"].gt(0).all()


def steps(batch):
    yield batch.sum()


@pytest.mark.parametrize(
    ("mistake", "advice", "loader", "step"),
    [
        (lambda: lk.diagnose(batches(), lambda batch: steps(batch[0]), batches=4), "pass a function", batches(),
         lambda batch: list(steps(batch[0]))),
        (lambda: lk.diagnose(iter([torch.zeros(2, 3, 4, 4)] * 3), torch.sum, batches=9),
         "pass an iterable that starts again", [torch.zeros(2, 3, 4, 4)] * 3, torch.sum),
        (lambda: lk.diagnose(batches(), 3), "step must be a function of one batch", batches(),
         lambda batch: batch[0] + 1),
    ],
)  # fmt: skip
def test_a_loader_and_a_step_are_as_is_said(mistake, advice, loader, step):
    assert advice in told(mistake)
    assert lk.diagnose(loader, step, batches=4, rounds=1, limit_s=5).frame["images_per_s"].gt(0).all()


def test_a_training_is_seen_with_the_steps_that_are_named():
    def train(loader, n_steps):
        with lk.watch() as watched:
            for _, _ in zip(range(n_steps), loader, strict=False):
                pass
        return watched

    said = told(lambda: train(batches(), 1).report())
    n_steps = int(said.partition("let the training take at least ")[2].split()[0])
    assert train(DataLoader(TensorDataset(torch.zeros(99, 3))), n_steps).report().shares
    assert "lk.diagnose(loader, step) takes any iterable" in told(lambda: train([torch.zeros(2)] * 9, 9).report())
    assert lk.diagnose([torch.zeros(2)] * 9, torch.sum, batches=4, rounds=1, limit_s=5).frame is not None


def test_a_budget_is_written_as_is_said():
    said = told(lambda: parse_budget("waiting=five"))
    assert parse_budget(said.partition("a budget is like ")[2].partition(",")[0]) == {"waiting": 0.05}
    names = said.partition("one of ")[2].partition(";")[0].split(", ")
    assert set(parse_budget(",".join(f"{name}=0.01" for name in names))) == set(names)
