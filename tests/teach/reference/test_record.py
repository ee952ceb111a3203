"""Reference runs: a whole rehearsal on the CPU at the smallest size, what is refused, and checks that really fail."""

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from functools import partial

import matplotlib.pyplot as plt
import pytest
import torch
from torchvision.transforms import v2
from typer.testing import CliRunner

import labkit as lk
from labkit.core import machine as env
from labkit.lab.cli import app
from labkit.teach.reference import experiments, fast_path, record
from labkit.teach.reference.runs import FOLDER
from tests.unsampled import leave_memory_out

CPU = torch.device("cpu")
TINY = env.Scale("ci", n_photos=4, n_camera=1, batch_size=2, rounds=1)
VARIANTS = {
    "03 pinned memory": ["pin_memory=False", "pin_memory=True", "pin_memory=True, non_blocking"],
    "06 light recipe on the device": ["v2, one draw a batch", "Kornia"],
    "06 heavy recipe on the device": ["v2, one draw a batch", "Kornia"],
    "06 mixing on the device": [
        "v2.CutMix", "v2.MixUp", "lk.mixup", "lk.cutmix", "write-up's CutMix",
    ],
    "06 who augments": ["CPU does all", "CPU crops, device colors", "CPU crops only"],
    "07 feeding a training step": [
        "pageable", "pinned", "pinned, non_blocking", "prefetched", "load alone", "compute alone",
    ],
    "11 copy to the GPU": ["pageable", "pinned", "pinned, non_blocking", "bandwidth: one block"],
    "11 nvJPEG": [
        "BatchLoader, copied", "BatchLoader", "decode limit of the CPU", "nvJPEG, decoding alone",
        "nvJPEG, cropped on the GPU",
    ],
    "13 peers on a GPU": ["DataLoader", "BatchLoader", *(peer.name for peer in fast_path.installed_dali())],
}  # fmt: skip


def labkit(*arguments):
    return CliRunner().invoke(app, ["reference", *map(str, arguments)])


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Photos go here; every experiment is as small as can be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABKIT_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setitem(env._SCALES, "ci", TINY)
        leave_memory_out(patch)
        yield


@pytest.fixture(scope="module")
def rehearsal(home, tmp_path_factory):
    """Folder and output of `python -m labkit reference --device cpu`."""
    folder, n_threads = tmp_path_factory.mktemp("rehearsal"), torch.get_num_threads()
    torch.set_num_threads(1)  # batches of two: threads would mostly wait for each other
    result = labkit("--device", "cpu", "--folder", folder, "--scale", "ci")
    torch.set_num_threads(n_threads)
    assert result.exit_code == 0, result.output
    return folder, result.output


@pytest.fixture
def store(home):
    return lk.FolderStore(lk.make_photos(lk.photo_root("imagenet"), TINY.n_photos, progress=False))


def test_a_rehearsal_stores_every_experiment(rehearsal):
    folder, output = rehearsal
    assert sorted(path.name for path in folder.iterdir()) == [f"{lk.env_id()}.csv", f"{lk.env_id()}.json"]
    frame = lk.load_frame(folder / f"{lk.env_id()}.csv")
    assert list(frame.experiment.unique()) == list(VARIANTS)
    for experiment, variants in VARIANTS.items():
        runs = frame[frame["experiment"] == experiment]
        assert set(runs.variant) == set(variants)
        assert set(runs.baseline) == {variants[0]}
        assert set(lk.summarize(runs).index) == set(variants)
        assert f"{experiment}: checking, then 1 rounds of {len(variants)} variants" in output
    assert (frame.images_per_s > 0).all()
    assert f"stored {folder / lk.env_id()}.csv and its .json" in output.replace("\n", "")


def test_the_json_names_the_machine(rehearsal):
    facts = json.loads((rehearsal[0] / f"{lk.env_id()}.json").read_text())
    assert facts["environment"] == lk.environment()
    assert facts["scale"] == "ci"
    assert list(facts["seconds"]) == list(VARIANTS)


def test_a_rehearsal_can_be_shown(rehearsal):
    lk.show_reference("06 mixing on the device", rehearsal[0])
    machine = lk.environment()["gpu"] or lk.environment()["cpu"]
    assert plt.gca().get_title("left") == f"06 mixing on the device: reference run on {machine}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")
def test_without_cuda_nothing_is_written(home, tmp_path):
    result = labkit("--folder", tmp_path / "new", "--scale", "ci")
    assert result.exit_code == 2
    assert "labkit: no CUDA device found" in result.output
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("folder", [[], ["--folder", FOLDER], ["--folder", FOLDER / ".." / "reference"]])
def test_a_cpus_runs_are_no_reference(home, folder):
    before = sorted(FOLDER.iterdir())
    result = labkit("--device", "cpu", *folder)
    assert result.exit_code == 2
    assert "runs with device='cpu' are not reference runs: choose another folder" in result.output
    assert sorted(FOLDER.iterdir()) == before


def refusing(message="apples are no pears"):
    def check():
        raise AssertionError(message)

    return experiments.Experiment("06 fruit", "a", {"a": lambda: [1]}, check)


@pytest.mark.parametrize("n_good", [0, 1])
def test_a_failing_check_leaves_nothing(home, tmp_path, monkeypatch, n_good):
    good = [replace(refusing(), check=lambda: None)] * n_good
    monkeypatch.setattr(record, "_make_experiments", lambda device, size: iter([*good, refusing()]))
    if not n_good:
        monkeypatch.setattr(experiments, "compare", lambda *args, **kwargs: pytest.fail("timed before it was checked"))
    result = labkit("--device", "cpu", "--folder", tmp_path / "new", "--scale", "ci")
    assert result.exit_code == 2
    assert "labkit: 06 fruit: the variants do not do the same work: apples are no pears" in result.output
    assert not (tmp_path / "new").exists()


def test_an_experiment_is_closed_and_is_no_rung(home):
    closed = []
    failing = replace(refusing(), close=lambda: closed.append("failing"))
    good = replace(failing, check=lambda: None, close=lambda: closed.append("good"))
    frame = good.run(2, progress=False)
    assert set(frame.experiment) == {"06 fruit"}
    assert len(frame) == 3  # with its warm-up
    assert not frame.rung.any()
    with pytest.raises(RuntimeError):
        failing.run(1, progress=False)
    assert closed == ["good", "failing"]


def test_pinned_batches_have_to_be_the_pageable_ones(store, monkeypatch):
    experiment = experiments.pinning(store, CPU, TINY)
    experiment.check()
    experiment.close()
    both = experiments._make_loaders(store, TINY)
    both[1].dataset._seed = 1  # other crops
    monkeypatch.setattr(experiments, "_make_loaders", lambda store, scale: both)
    with pytest.raises(AssertionError, match="pinned batches differ"):
        experiments.pinning(store, CPU, TINY).check()
    experiments._close(*both)


class OneDraw(torch.nn.Sequential):
    def forward(self, batch):
        return super().forward(batch[:1]).expand(len(batch), -1, -1, -1)


def followed_by(change):
    return lambda augment: torch.nn.Sequential(augment, v2.Lambda(change))


def spoiled(monkeypatch, library, wrap):
    original = experiments.make_augment

    def build(recipe="light", chosen="v2", **options):
        augment = original(recipe, chosen, **options)
        return wrap(augment) if chosen == library else augment

    monkeypatch.setattr(experiments, "make_augment", build)


@pytest.mark.parametrize(
    ("library", "wrap", "message"),
    [
        ("kornia", OneDraw, "Kornia: 1 different results of one picture, not 2"),
        ("v2", followed_by(lambda x: x + torch.rand(len(x), 1, 1, 1)), "v2.*: 2 different"),
        ("kornia", followed_by(lambda x: x[:, :, :-1]), r"Kornia gives \(2, 3, 223, 224\)"),
        ("v2", followed_by(lambda x: x / 0), "v2.*not finite"),
    ],
)
def test_the_check_of_augmenting_fails(monkeypatch, library, wrap, message):
    experiments.augment_on_device(CPU, TINY, compiled=False).check()
    spoiled(monkeypatch, library, wrap)
    with pytest.raises(AssertionError, match=message):
        experiments.augment_on_device(CPU, TINY, compiled=False).check()


def in_place(mix):
    def mixed(x, y, **options):
        images, targets = mix(x, y, **options)
        return x.copy_(images), targets

    return mixed


def changed(mix, of_images=lambda x: x, of_targets=lambda y: y):
    def mixed(x, y, **options):
        images, targets = mix(x, y, **options)
        return of_images(images), of_targets(targets)

    return mixed


@pytest.mark.parametrize(
    ("name", "sabotage", "message"),
    [
        ("mixup", in_place, "the input was changed"),
        ("cutmix", in_place, "the input was changed"),
        ("cutmix", partial(changed, of_targets=lambda y: y * 1.1), "lk.cutmix: targets do not sum to 1"),
        ("mixup", partial(changed, of_images=lambda x: x[..., 1:]), r"lk.mixup gives \(8, 3, 224, 223\)"),
        ("mixup", partial(changed, of_images=lambda x: x.flip(0)), "differ for the same draw"),
    ],
)
def test_the_check_of_mixing_fails(monkeypatch, name, sabotage, message):
    torch.manual_seed(0)
    size = replace(TINY, batch_size=8)  # of two images, each is its own partner half of the time
    experiments.mixing(CPU, size).check()
    monkeypatch.setattr(experiments, name, sabotage(getattr(experiments, name)))
    with pytest.raises(AssertionError, match=message):
        experiments.mixing(CPU, size).check()


def checked(experiment):
    try:
        experiment.check()
    finally:
        experiment.close()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda x: x[..., 1:], r"\(2, 3, 224, 224\) and \(2, 3, 224, 223\)"),
        (lambda x: x * 1.05, "the two normalise differently"),
    ],
)
def test_the_check_of_who_augments_fails(store, monkeypatch, spoil, message):
    spoiled(monkeypatch, "kornia", followed_by(spoil))
    with pytest.raises(AssertionError, match=message):
        checked(experiments.who_augments(store, CPU, TINY))


def test_the_check_of_who_augments_does_not_depend_on_luck(store):
    experiment = experiments.who_augments(store, CPU, TINY)
    for seed in range(20):
        torch.manual_seed(seed)
        experiment.check()
    experiment.close()


def test_the_check_of_who_augments_sees_other_samples(store, monkeypatch):
    original, made = experiments.make_loader, []

    def second_one_shuffled(dataset, config, **options):
        made.append(dataset)
        order = list(range(TINY.n_photos))[:: -1 if len(made) > 1 else 1]
        return original(dataset, config, sampler=order, **options)

    monkeypatch.setattr(experiments, "make_loader", second_one_shuffled)
    with pytest.raises(AssertionError, match="the two loaders give different samples"):
        checked(experiments.who_augments(store, CPU, TINY))


class Repeating:
    """A prefetcher that hands the first batch out again and again, as one whose memory is overwritten might."""

    def __init__(self, loader, device):
        self.loader = loader

    def set_epoch(self, epoch):
        self.loader.set_epoch(epoch)

    def __iter__(self):
        batches = list(self.loader)
        return iter(batches[:1] * len(batches))


def test_the_check_of_feeding_fails(store, monkeypatch):
    monkeypatch.setattr(experiments, "CUDAPrefetcher", Repeating)
    with pytest.raises(AssertionError, match="the ways of feeding give different batches"):
        checked(experiments.overlap(store, CPU, TINY))


def test_what_is_copied_has_to_arrive(monkeypatch):
    fast_path.copying(CPU, TINY).check()
    monkeypatch.setattr(fast_path, "_copy_batches", lambda batches, *_, **__: iter(batches.flip(0)))
    with pytest.raises(AssertionError, match="pageable: the copy differs from the original"):
        fast_path.copying(CPU, TINY).check()


def test_copies_are_counted_in_images():
    experiment = fast_path.copying(CPU, TINY)
    totals = {label: sum(make()) for label, make in experiment.variants.items()}
    assert set(totals.values()) == {64}  # 16 times as many as photos


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda images: [image[:, 1:] for image in images], r"brick/.*jpg|astronaut/.*jpg: .*and.*"),
        (lambda images: [255 - image for image in images], "the two decoders differ by"),
        (lambda images: images[::-1], r"jpg: "),
    ],
)
def test_the_check_of_nvjpeg_fails(store, monkeypatch, spoil, message):
    import torchvision.io

    fast_path.nvjpeg(store, CPU, TINY).check()
    original = torchvision.io.decode_jpeg
    monkeypatch.setattr(torchvision.io, "decode_jpeg", lambda *args, **options: spoil(original(*args, **options)))
    with pytest.raises(AssertionError, match=message):
        fast_path.nvjpeg(store, CPU, TINY).check()


def test_nvjpeg_decodes_every_photo(store):
    experiment = fast_path.nvjpeg(store, CPU, TINY)
    assert list(experiment.variants["nvJPEG, decoding alone"]()) == [2, 2]
    assert [images.shape for images in experiment.variants["nvJPEG, cropped on the GPU"]()] == [(2, 3, 224, 224)] * 2


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda images, labels: (images[..., 1:], labels), r"BatchLoader gives \(2, 3, 224, 223\)"),
        (lambda images, labels: (images.float(), labels), "BatchLoader gives torch.float32"),
        (lambda images, labels: (images, labels * 0), "BatchLoader: not every image came once, with its label"),
    ],
)
def test_the_check_of_peers_fails(store, monkeypatch, spoil, message):
    checked(fast_path.peers_on_gpu(store, CPU, TINY))
    original = fast_path.BatchLoader.__iter__
    monkeypatch.setattr(fast_path.BatchLoader, "__iter__", lambda self: (spoil(*batch) for batch in original(self)))
    with pytest.raises(AssertionError, match=message):
        checked(fast_path.peers_on_gpu(store, CPU, TINY))


@pytest.mark.cuda
def test_the_fast_path_on_a_gpu(store):
    device = torch.device("cuda")
    experiments_there = [fast_path.nvjpeg(store, device, TINY), fast_path.peers_on_gpu(store, device, TINY)]
    for experiment in [fast_path.copying(device, TINY), *experiments_there]:
        checked(experiment)
    assert next(experiments_there[0].variants["nvJPEG, cropped on the GPU"]()).is_cuda


def test_what_the_package_stores_is_of_cuda_machines():
    for path in FOLDER.glob("*.csv"):
        frame = lk.load_frame(path)
        facts = json.loads(path.with_suffix(".json").read_text())
        assert facts["environment"]["gpu"], f"{path} was recorded without a GPU"
        assert set(frame.device) == {"cuda"}
        assert set(frame.env_id) == {path.stem}
        assert set(VARIANTS) <= set(frame.experiment)
    assert {path.stem for path in FOLDER.glob("*.csv")} == {path.stem for path in FOLDER.glob("*.json")}


WITHOUT_JUPYTER = """
    import sys
    missing = {"jupyterlab", "IPython", "ipykernel", "ipywidgets", "nbformat", "nbclient", "nbconvert", "notebook",
               "jupyter_core", "jupyter_client", "matplotlib", "seaborn"}

    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in missing:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Missing())
    from labkit.core import machine as env
    env._SCALES["ci"] = env.Scale("ci", n_photos=4, n_camera=1, batch_size=2, rounds=1)
    from labkit.teach.reference import experiments, record
    record._make_experiments = lambda device, size: iter([experiments.mixing(device, size)])
    import labkit.lab.cli
    sys.argv = ["labkit", "reference", "--device", "cpu", "--scale", "ci", "--folder", sys.argv[1]]
    labkit.lab.cli.app()
"""


def test_it_runs_where_jupyter_and_the_plotting_libraries_are_missing(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(WITHOUT_JUPYTER), str(tmp_path / "new")]
    child = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "LABKIT_HOME": str(tmp_path)}
    )
    assert child.returncode == 0, child.stderr[-2000:]
    assert set(lk.load_frame(next((tmp_path / "new").glob("*.csv"))).experiment) == {"06 mixing on the device"}
