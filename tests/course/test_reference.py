"""Reference runs: a whole rehearsal on the CPU, what is refused, and checks that fail."""

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from inspect import signature

import pytest
import torch
from torchvision.transforms import v2
from typer.testing import CliRunner

import labkit as lk
from labkit import course
from labkit.app.cli import app
from labkit.course import reference
from labkit.course.reference import FOLDER, Experiment
from labkit.peers.peer import missing_modules
from labkit.util import machine
from labkit.util.machine import Scale, environment
from tests.timing import leave_memory_out

CPU = torch.device("cpu")
TINY = Scale("ci", n_photos=4, n_camera=1, batch_size=2, rounds=1, budget_s=0.0, min_steady_s=0.0)
VARIANTS = {
    "03 pinned memory": ["pin_memory=False", "pin_memory=True", "pin_memory=True, non_blocking"],
    "06 light recipe on the device": ["v2, one draw per batch", "Kornia"],
    "06 heavy recipe on the device": ["v2, one draw per batch", "Kornia"],
    "06 mixing on the device": ["v2.CutMix", "v2.MixUp", "lk.mixup", "lk.cutmix"],
    "06 who augments": ["Albumentations", "colors on the device", "crops alone"],
    "07 feeding a training step": [
        "pageable", "pinned", "pinned, non_blocking", "prefetched", "load alone", "compute alone",
    ],
    "13 peers on a GPU": [
        "DataLoader", "BatchLoader", *(peer.name for peer in reference.DALI if not missing_modules(peer)),
    ],
}  # fmt: skip


def test_what_the_package_stores_is_of_cuda_machines():
    for path in FOLDER.glob("*.csv"):
        frame = lk.load_frame(path)
        assert json.loads(path.with_suffix(".json").read_text())["environment"]["gpu"], f"{path}: without a GPU"
        assert set(frame.device) == {"cuda"}
        assert set(frame.env_id) == {path.stem}
        assert set(VARIANTS) <= set(frame.experiment)
    assert {path.stem for path in FOLDER.glob("*.csv")} == {path.stem for path in FOLDER.glob("*.json")}


def labkit(*arguments):
    return CliRunner().invoke(app, ["reference", *map(str, arguments)])


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Photos go here; every experiment is as small as can be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABKIT_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setitem(machine._SCALES, "ci", TINY)
        leave_memory_out(patch)
        yield


@pytest.fixture
def store(home):
    return lk.FolderStore(lk.make_photos(course.photo_root("imagenet"), TINY.n_photos, progress=False))


def small_model(num_classes):
    """In place of ResNet-18, whose every step takes a simulated device a second."""
    nn = torch.nn
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes))


def fruit(check=lambda: None, **fields):
    return Experiment("06 fruit", "a", {"a": lambda: [1]}, check, **fields)


def no_pears():
    raise AssertionError("apples are no pears")


class TestRecording:
    @pytest.mark.exhaustive
    def test_a_rehearsal_stores_every_experiment(self, home, tmp_path, monkeypatch):
        monkeypatch.setattr("torchvision.models.resnet18", small_model)
        n_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # batches of two: threads would mostly wait for each other
        result = labkit("--device", "cpu", "--folder", tmp_path, "--scale", "ci")
        torch.set_num_threads(n_threads)
        assert result.exit_code == 0, result.output
        assert sorted(path.name for path in tmp_path.iterdir()) == [f"{lk.env_id()}.csv", f"{lk.env_id()}.json"]
        frame = lk.load_frame(tmp_path / f"{lk.env_id()}.csv")
        assert list(frame.experiment.unique()) == list(VARIANTS)
        for experiment, variants in VARIANTS.items():
            runs = frame[frame["experiment"] == experiment]
            assert set(lk.summarize(runs).index) == set(runs.variant) == set(variants)
            assert set(runs.baseline) == {variants[0]}
            assert f"{experiment}: checking, then 1 rounds of {len(variants)} variants" in result.output
        assert (frame.images_per_s > 0).all()
        assert f"stored {tmp_path / lk.env_id()}.csv and its .json" in result.output.replace("\n", "")
        facts = json.loads((tmp_path / f"{lk.env_id()}.json").read_text())
        assert (facts["environment"], facts["scale"], list(facts["seconds"])) == (environment(), "ci", list(VARIANTS))

    @pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")
    def test_without_cuda_nothing_is_written(self, home, tmp_path):
        result = labkit("--folder", tmp_path / "new", "--scale", "ci")
        assert result.exit_code == 2
        assert "labkit: no CUDA device found" in result.output
        assert not (tmp_path / "new").exists()

    @pytest.mark.parametrize("folder", [[], ["--folder", FOLDER / ".." / "reference"]])
    @pytest.mark.parametrize("kind", [["--device", "cpu"], ["--simulated"]])
    def test_what_is_no_run_on_a_gpu_is_no_reference(self, home, kind, folder):
        before = sorted(FOLDER.glob("*"))
        result = labkit(*kind, *folder)
        assert result.exit_code == 2
        assert "are not reference runs: choose another folder" in result.output
        assert sorted(FOLDER.glob("*")) == before

    @pytest.mark.parametrize("n_good", [0, 1])
    def test_a_failing_check_leaves_nothing(self, home, tmp_path, monkeypatch, n_good):
        monkeypatch.setattr(reference, "pinning", lambda *scale: fruit(no_pears if n_good == 0 else lambda: None))
        monkeypatch.setattr(reference, "augment_on_device", lambda *scale, compiled: fruit(no_pears))
        result = labkit("--device", "cpu", "--folder", tmp_path / "new", "--scale", "ci")
        assert result.exit_code == 2
        assert "labkit: 06 fruit: the variants do not do the same work: apples are no pears" in result.output
        assert not (tmp_path / "new").exists()

    def test_an_experiment_is_checked_before_it_is_timed_then_closed_and_is_no_rung(self, home):
        done = []
        good = fruit(close=lambda: done.append("good"))
        frame = good.run(2, progress=False)
        assert set(frame.experiment) == {"06 fruit"}
        assert len(frame) == 3  # with its warm-up
        assert not frame.rung.any()
        failing = replace(good, check=no_pears, close=lambda: done.append("failing"))
        with pytest.raises(RuntimeError):
            replace(failing, variants={"a": lambda: done.append("timed") or [1]}).run(1, progress=False)
        assert done == ["good", "failing"]

    @pytest.mark.exhaustive
    def test_it_runs_where_jupyter_and_the_plotting_libraries_are_missing(self, tmp_path):
        command = [sys.executable, "-c", textwrap.dedent(WITHOUT_JUPYTER), str(tmp_path / "new")]
        place = {**os.environ, "LABKIT_HOME": str(tmp_path)}
        child = subprocess.run(command, capture_output=True, text=True, timeout=120, env=place)
        assert child.returncode == 0, child.stderr[-2000:]
        assert set(lk.load_frame(next((tmp_path / "new").glob("*.csv"))).experiment) == {"06 mixing on the device"}


WITHOUT_JUPYTER = """
    import sys
    missing = {"jupyterlab", "IPython", "ipykernel", "ipywidgets", "nbformat", "nbclient", "nbconvert", "notebook",
               "jupyter_core", "jupyter_client", "matplotlib", "seaborn"}

    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in missing:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Missing())
    from labkit.util import machine
    machine._SCALES["ci"] = machine.Scale("ci", n_photos=4, n_camera=1, batch_size=2, rounds=1)
    from labkit.course import reference
    reference._make_experiments = lambda device, size: iter([reference.mixing(device, size)])
    import labkit.app.cli
    sys.argv = ["labkit", "reference", "--device", "cpu", "--scale", "ci", "--folder", sys.argv[1]]
    labkit.app.cli.app()
"""


def other_crops(make_loaders):
    def make(store, scale):
        both = make_loaders(store, scale)
        both[1].seed = 1
        return both

    return make


class OneDraw(torch.nn.Sequential):
    def forward(self, batch):
        return super().forward(batch[:1]).expand(len(batch), -1, -1, -1)


def of_library(library, wrap):
    """Spoils what `make_augment` makes for one library."""

    def spoil(make_augment):
        def make(recipe="light", chosen="v2", **options):
            augment = make_augment(recipe, chosen, **options)
            return wrap(augment) if chosen == library else augment

        return make

    return spoil


def after(library, change):
    return of_library(library, lambda augment: torch.nn.Sequential(augment, v2.Lambda(change)))


def on_results(change):
    """Spoils a function's results; `change` gets them, and its first argument."""
    return lambda function: lambda first, *rest, **options: change(function(first, *rest, **options), first)


def on_batches(change):
    return lambda iterate: lambda self: (change(*batch) for batch in iterate(self))


def second_one_reversed(make_loader):
    orders = [list(range(TINY.n_photos)), list(range(TINY.n_photos))[::-1]]
    return lambda dataset, config, **options: make_loader(dataset, config, sampler=orders.pop(0), **options)


class Repeating:
    """A prefetcher that hands the first batch out again and again, as one whose memory is overwritten might."""

    def __init__(self, loader, device):
        self.loader, self.set_epoch = loader, loader.set_epoch

    def __iter__(self):
        batches = list(self.loader)
        return iter(batches[:1] * len(batches))


IN_PLACE = on_results(lambda mixed, x: (x.copy_(mixed[0]), mixed[1]))


def checked(experiment):
    try:
        experiment.check()
    finally:
        experiment.close()


class TestChecks:
    """Unspoiled, all of them pass in the rehearsal."""

    @pytest.mark.exhaustive
    @pytest.mark.parametrize(
        ("make", "where", "spoil", "message"),
        [
            ("pinning", "_make_loaders", other_crops, "pinned batches differ"),
            ("augment_on_device", "make_augment", of_library("kornia", OneDraw), "Kornia: 1 different .*, not 8"),
            ("augment_on_device", "make_augment", after("v2", lambda x: x + torch.rand(8, 1, 1, 1)), "v2.*: 8 differ"),
            ("augment_on_device", "make_augment", after("kornia", lambda x: x[:, :, :-1]), r"gives \(8, 3, 223, 224\)"),
            ("augment_on_device", "make_augment", after("v2", lambda x: x / 0), "v2.*not finite"),
            ("mixing", "cutmix", IN_PLACE, "the input was changed"),
            ("mixing", "cutmix", on_results(lambda mixed, x: (mixed[0], mixed[1] * 1.1)), "targets do not sum to 1"),
            ("mixing", "mixup", on_results(lambda mixed, x: (mixed[0][..., 1:], mixed[1])), r"gives \(8, 3, 224, 223"),
            ("mixing", "mixup", on_results(lambda mixed, x: (mixed[0].flip(0), mixed[1])), "differ for the same draw"),
            ("who_augments", "make_augment", after("kornia", lambda x: x[..., 1:]), r"224\) and \(2, 3, 224, 223\)"),
            ("who_augments", "make_augment", after("kornia", lambda x: x * 1.05), "the two normalize differently"),
            ("who_augments", "make_loader", second_one_reversed, "the two loaders give different samples"),
            ("overlap", "CUDAPrefetcher", lambda _: Repeating, "the ways of feeding give different batches"),
            ("peers_on_gpu", "__iter__", on_batches(lambda x, y: (x[..., 1:], y)), r"BatchLoader gives .*224, 223\)"),
            ("peers_on_gpu", "__iter__", on_batches(lambda x, y: (x.float(), y)), "BatchLoader gives torch.float32"),
            ("peers_on_gpu", "__iter__", on_batches(lambda x, y: (x, y * 0)), "not every image came once"),
        ],
    )
    def test_a_check_finds_different_work(self, store, monkeypatch, make, where, spoil, message):
        torch.manual_seed(0)
        owner = reference.BatchLoader if where == "__iter__" else reference
        monkeypatch.setattr(owner, where, spoil(getattr(owner, where)))
        make, arguments = getattr(reference, make), {"store": store, "device": CPU, "scale": TINY}
        arguments |= {"recipe": "light", "compiled": False}
        if "store" not in signature(make).parameters:
            arguments["scale"] = replace(TINY, batch_size=8)  # of two images, each is its own partner half of the time
        experiment = make(**{name: arguments[name] for name in signature(make).parameters if name in arguments})
        with pytest.raises(AssertionError, match=message):
            checked(experiment)

    @pytest.mark.cuda
    def test_the_fast_path_on_a_gpu(self, store):
        """On a real one only: DALI is not torch's."""
        checked(reference.peers_on_gpu(store, torch.device("cuda"), TINY))
