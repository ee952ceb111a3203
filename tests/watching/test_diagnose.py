"""How a command line names a training; `lk.tune`, which chooses."""

import random
import re
import sys
import time
from dataclasses import replace

import pytest
import torch
from torch.utils.data import ChainDataset, Dataset

import labkit as lk
from labkit.errors import CannotDiagnose
from labkit.watching import tune as tuning
from labkit.watching.diagnose import made_training

NAME = "training_of_a_test"
SCRIPT = """
import sys
from os.path import join

seen = list(sys.argv)
LOADER, number = [1, 2], 3

def make(): return LOADER, len
def as_list(): return [LOADER, len]
def no_step(): return LOADER, 3
"""
FORM = ": write module:function, such as train:make_training for train.py in this folder"
GAVE = "{} gave {}: return loader, step, where step(batch) trains"


class TestANamedTraining:
    @pytest.fixture(autouse=True)
    def here(self, tmp_path, monkeypatch):
        """A script in the current folder, which is not on the path yet; beside another one of its name."""
        monkeypatch.setattr(sys, "path", [str(tmp_path / "elsewhere"), *(place for place in sys.path if place)])
        monkeypatch.setattr(sys, "argv", ["labkit"])
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / f"{NAME}.py").write_text("raise SystemExit('the wrong one')")
        (tmp_path / f"{NAME}.py").write_text(SCRIPT)
        (tmp_path / "lacking.py").write_text("import not_there_at_all")
        monkeypatch.chdir(tmp_path)
        yield str(tmp_path)
        sys.modules.pop(NAME, None)

    def test_is_the_one_of_the_current_folder_and_finds_its_arguments(self, here):
        assert made_training(f"{NAME}:make", ["--size", "3"]) == ([1, 2], len)
        assert sys.modules[NAME].seen == [NAME, "--size", "3"]
        assert sys.path[0] == here
        assert made_training(f"{NAME}:as_list") == ([1, 2], len)
        assert sys.path.count(here) == 1

    @pytest.mark.parametrize(
        ("name", "says"),
        [
            *((name, f"{name!r}{FORM}") for name in ("make", "train.py:make")),
            ("labkit.no:make", "there is no module labkit.no here (HERE) and none is installed"),
            (f"{NAME}:number", f"{NAME} has no function number"),
            (f"{NAME}:no_step", GAVE.format(f"{NAME}:no_step", "list, int")),
        ],
    )  # fmt: skip
    def test_that_is_none_is_told(self, here, name, says):
        with pytest.raises(CannotDiagnose, match=f"^{re.escape(says.replace('HERE', here))}"):
            made_training(name)

    def test_keeps_the_error_of_what_it_lacks_itself(self):
        with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
            made_training("lacking:make")


class Naps(Dataset):
    """Samples that are waited for, as from a slow storage."""

    def __init__(self, seconds: float, count: int = 40):
        self.seconds, self.count = seconds, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.full((3, 4, 4), index % 255, dtype=torch.uint8)


SERIAL = lk.LoaderConfig(batch_size=2, num_workers=0)


class TestTune:
    @pytest.mark.exhaustive
    @pytest.mark.alone
    def test_lets_workers_share_the_waiting(self):
        tuned = lk.tune(Naps(0.02, count=7), config=SERIAL, num_workers=(0, 4), budget_s=2)
        config, runs = tuned
        assert config == replace(SERIAL, num_workers=4, oversubscribe=config.oversubscribe).resolved()
        assert set(runs["variant"]) == {"default", "4 workers"}
        assert "4 workers: " in repr(tuned)
        loader = lk.make_loader(Naps(0.0, count=7), config)
        assert torch.cat([batch[:, 0, 0, 0] for batch in loader]).tolist() == list(range(7))
        loader.close()

    def test_keeps_the_default_where_nothing_is_faster(self):
        n_images = set()
        tuned = lk.tune(Naps(0.0), lambda batch: n_images.add(len(batch)), config=SERIAL, num_workers=[0], budget_s=0.5)
        assert tuned.config == SERIAL.resolved()
        assert set(tuned.frame["variant"]) == {"default", "step alone"}
        assert "No other number of workers was faster" in repr(tuned)
        assert "of the rate of the step alone" in tuned.why
        assert n_images == {2}

    def test_tries_numbers_up_to_twice_the_cores(self, monkeypatch):
        monkeypatch.setattr(tuning, "cores_per_rank", lambda: 1)
        tried = []

        def compare(variants, **options):
            tried.extend(variants)
            raise KeyboardInterrupt

        monkeypatch.setattr(tuning, "compare", compare)
        with pytest.raises(KeyboardInterrupt):
            lk.tune(Naps(0.0), config=SERIAL)
        assert tried == ["default", "1 worker", "2 workers"]  # the default has none

    def test_leaves_generators_as_they_were(self):
        before = torch.get_rng_state(), random.getstate()
        lk.tune(Naps(0.0), lambda batch: torch.rand(random.randrange(3)), config=SERIAL, num_workers=[], budget_s=0.1)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]

    @pytest.mark.parametrize(
        ("arguments", "error", "says"),
        [
            ({"step": 3}, TypeError, "step must be a function of one batch or None, got a int"),
            ({"dataset": Naps(0, count=0)}, ValueError, "holds no sample"),
            ({"dataset": ChainDataset([])}, TypeError, "not a map-style"),
        ],
    )
    def test_refuses_wrong_arguments(self, arguments, error, says):
        with pytest.raises(error, match=says):
            lk.tune(**{"dataset": Naps(0), "config": SERIAL, **arguments})
