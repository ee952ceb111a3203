"""The comparison with other loaders: fakes that do the work, and fakes that get each part of it wrong."""

import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import cloudpickle
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F
from typer.testing import CliRunner

from labkit.app.cli import app
from labkit.data.stores import FolderStore
from labkit.errors import HostError
from labkit.measure.frames import load_frame, make_frame, save_frame
from labkit.measure.usage import apart
from labkit.peers import check as peer_check, check as pictures, command as peer_report, registry as peers
from labkit.peers.adapters.own import BASELINE, DECODE_LIMIT, MEMCPY_LIMIT, NAIVE, OWN, WRITE_LIMIT
from labkit.peers.host import Host, HostedLoader
from labkit.peers.peer import (
    CLASSES,
    JPEG_FILES,
    JPEG_PACKED,
    MEAN,
    RAW_PIXELS,
    STD,
    Peer,
    Work,
    labelled_photos,
    prepare_once,
)
from labkit.peers.ranking import against_best, left_out, peer_table
from labkit.peers.registry import PEERS, PeerError, check_peer, compare_peers, missing_modules, plot_peers
from labkit.peers.run import append_runs, comparisons
from labkit.util.machine import env_id

cloudpickle.register_pickle_by_value(__import__(__name__, fromlist=["_"]))  # hosts cannot import test modules


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Work:
    folder = tmp_path_factory.mktemp("peers")
    photos = pictures.make_probe_pictures(folder / "check" / "pictures")
    return Work(photos, folder, num_workers=2)


@cache
def _decoded(root: Path) -> list[tuple[torch.Tensor, int]]:
    photos = labelled_photos(Work(root, root))
    return [(F.pil_to_tensor(Image.open(path).convert("RGB")), label) for path, label in photos]


def _fake_epoch(work: Work, *, antialias=True, shuffle=True, flip=0.5, crop=True, spoil=None, seed=None, **crops):
    """The work in plain torchvision; `spoil` gets the list of samples and gives another."""
    if seed is not None:
        torch.manual_seed(seed)
    size = (work.size, work.size)
    cut = v2.RandomResizedCrop(size, antialias=antialias, **crops) if crop else v2.Resize(size)
    transform = v2.Compose([cut, v2.RandomHorizontalFlip(flip)])
    photos = _decoded(work.root)
    order = torch.randperm(len(photos)).tolist() if shuffle else range(len(photos))
    samples = [(transform(photos[index][0]), photos[index][1]) for index in order]
    samples = spoil(samples) if spoil else samples
    for start in range(0, len(samples), work.batch_size):
        images, labels = zip(*samples[start : start + work.batch_size], strict=True)
        yield torch.stack(images), torch.tensor(labels)


def _fake(name="fake", **settings) -> Peer:
    return Peer(name, JPEG_FILES, True, "pip install fake", (), loader=partial(_fake_epoch, **settings))


# --- the pictures, against torchvision's crops with known boxes


def _cut(work: Work, number: int, box: tuple[int, int, int, int], antialias: bool) -> torch.Tensor:
    picture = F.pil_to_tensor(Image.open(work.root / pictures.picture_key(number)))
    return F.resized_crop(picture, *box, [224, 224], antialias=antialias)


@pytest.mark.parametrize("flipped", [False, True])
def test_a_crop_tells_its_picture_its_box_and_its_flip(work, flipped):
    boxes = [(0, 0, 600, 800), (100, 250, 300, 350), (330, 500, 180, 220), (17, 3, 571, 640)]
    crops = []
    for number, (top, left, height, width) in enumerate(boxes):
        crop = _cut(work, number * 17, (top, left, height, width), antialias=True)
        crops.append(F.horizontal_flip(crop) if flipped else crop)
    seen = pictures.read_crops(torch.stack(crops))
    assert seen.number.tolist() == [0, 17, 34, 51]
    np.testing.assert_allclose(seen.height, [box[2] / 600 for box in boxes], rtol=0.03)
    np.testing.assert_allclose(seen.width, [box[3] / 800 for box in boxes], rtol=0.03)
    assert seen.flipped.tolist() == [flipped] * 4
    assert not seen.upside_down.any()


@pytest.mark.exhaustive
@pytest.mark.parametrize("antialias", [False, True])
def test_grain_does_not_make_a_small_crop_look_like_a_wrong_one(work, antialias):
    """Else a loader that does the work is refused now and then: the smallest crops, widest and highest, anywhere."""
    draw = np.random.default_rng(1)
    for height, width in [(170, 226), (226, 170)]:
        corners = [(int(draw.integers(600 - height)), int(draw.integers(800 - width))) for _ in range(60)]
        boxes = [(*corner, height, width) for corner in corners]
        seen = pictures.read_crops(torch.stack([_cut(work, *numbered, antialias) for numbered in enumerate(boxes)]))
        ratio, area = seen.width * 800 / (seen.height * 600), seen.width * seen.height * 800 * 600
        assert np.abs(ratio / (width / height) - 1).max() < peer_check._TOLERANCE - 1
        assert np.abs(area / (width * height) - 1).max() < peer_check._TOLERANCE - 1


def test_pictures_are_made_once_and_the_same(work, tmp_path):
    again = pictures.make_probe_pictures(tmp_path)
    assert FolderStore(again).keys() == FolderStore(work.root).keys()
    assert (again / "blue/001.jpg").read_bytes() == (work.root / "blue/001.jpg").read_bytes()


# --- the check


def test_who_does_the_work_passes(work):
    found = check_peer(_fake(), work)
    assert found["images"] == 2 * pictures.N_PICTURES
    assert 0.33 < found["area"] < 0.53


def _on_images(change):
    return lambda samples: [(change(image), label) for image, label in samples]


def _move_labels(samples):
    images, labels = zip(*samples, strict=True)
    return list(zip(images, labels[1:] + labels[:1], strict=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"spoil": lambda samples: samples[1:]}, "never came"),
        ({"spoil": lambda samples: [samples[1], *samples[1:]]}, "more than once"),
        ({"spoil": _move_labels}, "labels"),
        ({"spoil": _on_images(lambda image: image / 255)}, "float32, not uint8"),
        ({"spoil": _on_images(lambda image: image.flip(0))}, "colors"),
        ({"spoil": _on_images(lambda image: image[:, :200])}, "shape"),
        ({"spoil": _on_images(lambda image: image.flip(1))}, "upside down"),
        ({"spoil": lambda samples: []}, "no batch"),
        ({"shuffle": False}, "nothing is shuffled"),
        ({"seed": 0}, "same order"),
        ({"crop": False}, "area of crops hardly varies"),
        ({"scale": (0.5, 1.0)}, "crops cover"),
        ({"scale": (0.01, 1.0)}, "crops have area 0.0"),
        ({"ratio": (0.4, 2.5)}, "crops have aspect ratio"),
        ({"flip": 0.0}, "0% of the images are flipped"),
        ({"flip": 1.0}, "100% of the images are flipped"),
        ({"antialias": False}, "does not antialias"),
    ],
)
def test_who_gets_it_wrong_is_told_what(work, settings, message):
    with pytest.raises(PeerError, match=message):
        check_peer(_fake(**settings), work)


def _normalised(image, mean=MEAN, std=STD):
    return F.normalize(F.to_dtype(image, torch.float32, scale=True), list(mean), list(std))


@pytest.mark.slow
def test_normalised_floats_pass_where_they_are_the_work(work):
    floats = replace(work, dtype="float32")
    found = check_peer(_fake(spoil=_on_images(_normalised)), floats)
    assert 0.33 < found["area"] < 0.53
    assert found["grain"] < 3.6
    with pytest.raises(PeerError, match="uint8, not float32"):
        check_peer(_fake(), floats)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda image: image / 255, "undone, mean and deviation of red, green and blue are"),
        (lambda image: image.float(), "undone, they are .* not within 0 to 255"),
        (partial(_normalised, std=(1.0, 1.0, 1.0)), "floats are not normalised"),
        (partial(_normalised, mean=(0.0, 0.0, 0.0)), "floats are not normalised"),
        (partial(_normalised, mean=MEAN[::-1], std=(0.3, 0.2, 0.3)), "floats are not normalised|colors"),
    ],
)
def test_floats_that_are_normalised_otherwise_are_refused(work, change, message):
    with pytest.raises(PeerError, match=message):
        check_peer(_fake(spoil=_on_images(change)), replace(work, dtype="float32"))


@cache
def _few_crops(root: Path, n_crops: int) -> list[list[tuple[torch.Tensor, int]]]:
    """As a raw format that holds crops cut beforehand: so many of each picture."""
    cut = v2.RandomResizedCrop((224, 224), antialias=True)
    return [[(cut(image), label) for _ in range(n_crops)] for image, label in _decoded(root)]


@pytest.mark.exhaustive
def test_a_raw_format_with_few_crops_of_each_picture_is_refused(work):
    def loader(work):
        choices = [crops[torch.randint(len(crops), ())] for crops in _few_crops(work.root, 2)]
        flip = v2.RandomHorizontalFlip()
        order = torch.randperm(len(choices)).tolist()
        images, labels = zip(*[(flip(choices[index][0]), choices[index][1]) for index in order], strict=True)
        return zip(torch.stack(images).split(64), torch.tensor(labels).split(64), strict=True)

    with pytest.raises(PeerError, match="two epochs cut the same crops"):
        check_peer(Peer("few", RAW_PIXELS, True, "", (), loader=loader), work)


@pytest.mark.exhaustive
def test_one_crop_for_a_whole_batch_is_refused(work):
    cut = v2.Compose([v2.RandomResizedCrop((224, 224), antialias=True), v2.RandomHorizontalFlip()])

    def loader(work):
        photos = _decoded(work.root)
        for indices in torch.randperm(len(photos)).split(work.batch_size):
            images, labels = zip(*[photos[index] for index in indices], strict=True)
            yield cut(torch.stack(images)), torch.tensor(labels)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        with pytest.raises(PeerError, match=r"few distinct crops: \d+ among 140"):
            check_peer(replace(_fake(), loader=loader), replace(work, batch_size=4))


@pytest.mark.slow
def test_two_epochs_with_the_same_crops_are_found(work):
    def loader(work):
        with torch.random.fork_rng():
            batches = list(_fake_epoch(work, shuffle=False, seed=0))
        images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        order = torch.randperm(len(images))
        return zip(images[order].split(64), labels[order].split(64), strict=True)

    with pytest.raises(PeerError, match="same crops"):
        check_peer(replace(_fake(), loader=loader), work)


@pytest.mark.slow
def test_only_who_says_so_may_drop_a_short_batch(work):
    def loader(work):
        yield from list(_fake_epoch(work))[:1]

    with pytest.raises(PeerError, match="never came"):
        check_peer(replace(_fake(), loader=loader), work)
    assert check_peer(replace(_fake(), loader=loader, drops_last=True), work)["images"] == 128


@pytest.fixture
def loaders_end():
    """Adapters keep their loaders, and those their workers: each has a process of its own outside of these tests."""
    yield
    for name, module in list(sys.modules.items()):
        if name.startswith("labkit.peers.adapters."):
            for kept in vars(module).values():
                getattr(kept, "cache_clear", bool)()


REDUCES = ("OpenCV reduced", "turboloader tar")


@pytest.mark.exhaustive
@pytest.mark.usefixtures("loaders_end")
@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name, peer in PEERS.items() for dtype in peer.dtypes])
def test_each_adapter_does_the_work(name, dtype, work):
    peer, work = PEERS[name], replace(work, dtype=dtype)
    if missing_modules(peer):
        pytest.skip(f"missing: {peer.install}")
    found = check_peer(peer, work)
    assert found["images"] == 140 or peer.drops_last
    if peer.source == RAW_PIXELS or name in REDUCES:  # pixels that were averaged before they are sampled
        assert not peer.antialias or found["grain"] < 3.6
    else:
        assert peer.antialias is None or (found["grain"] < 3.6) == peer.antialias


@pytest.mark.slow
@pytest.mark.usefixtures("loaders_end")
@pytest.mark.parametrize("peer", [NAIVE, *OWN], ids=lambda peer: peer.name)
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_each_own_row_does_the_work(peer, dtype, work):
    assert check_peer(peer, replace(work, dtype=dtype))["images"] == 140


# --- prepared formats


def test_a_format_is_built_once_for_the_same_photos(work, tmp_path):
    photos = tmp_path / "photos"
    pictures.make_probe_pictures(photos)
    own, built = Work(photos, tmp_path / "scratch"), []

    def build(folder):
        built.append(folder)
        (folder / "data").write_text(str(len(built)))

    assert prepare_once(own, "fake", build) == prepare_once(own, "fake", build) == own.scratch / "fake"
    assert len(built) == 1
    (photos / "blue/001.jpg").write_bytes(b"another")
    prepare_once(own, "fake", build)
    assert (own.scratch / "fake" / "data").read_text() == "2"


def test_a_format_that_was_not_finished_is_built_anew(work, tmp_path):
    own = replace(work, scratch=tmp_path)

    def fail(folder):
        (folder / "half").touch()
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError):
        prepare_once(own, "fake", fail)
    assert not (tmp_path / "fake").exists()
    prepare_once(own, "fake", lambda folder: (folder / "whole").touch())
    assert [path.name for path in (tmp_path / "fake").iterdir()] == ["whole"]


# --- hosts


def _dies(work):
    os.kill(os.getpid(), signal.SIGSEGV)
    yield


def _sleeps(work):
    time.sleep(60)
    yield


def _raises(work):
    raise OSError("no such\nthing")
    yield


def _raises_in_stages(work):
    raise ExceptionGroup("stages failed", [ExceptionGroup("the second", [OSError("no ffmpeg")])])
    yield


def _counts(work):
    print("what a loader prints does not disturb")
    yield from (torch.zeros(n, 3, 8, 8, dtype=torch.uint8) for n in (3, 3, 1))


def test_a_hosted_epoch_counts_images_and_tells_its_costs(work):
    with Host(replace(_fake(), loader=_counts), work) as host:
        loader = HostedLoader(host, work)
        assert list(loader) == [3, 11]  # the first run reads two epochs
        assert loader.cpu_s >= 0
        assert loader.peak_mem_mb > 10
        assert loader.page_cache in ("warm", "unknown")
        pid = host._process.pid
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, 0)
    assert not apart


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (_dies, "ended by SIGSEGV"),
        (_sleeps, "no answer"),
        (_raises, "such"),
        (_raises_in_stages, "^OSError: no ffmpeg$"),
    ],
)
def test_what_goes_wrong_in_a_host_is_one_line(work, loader, message):
    with Host(replace(_fake(), loader=loader), work, timeout_s=20 if loader != _sleeps else 4) as host:
        with pytest.raises(HostError, match=message) as caught:
            list(HostedLoader(host, work))
        assert "\n" not in str(caught.value)


def _leaves_a_file(work, then=_counts):
    Path(tempfile.mkdtemp(), "left").touch()
    return then(work)


@pytest.mark.exhaustive
@pytest.mark.parametrize("loader", [_leaves_a_file, partial(_leaves_a_file, then=_dies)])
def test_what_is_left_in_temporary_folders_goes_with_the_host(work, tmp_path, monkeypatch, loader):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Host(replace(_fake(), loader=loader), work) as host:
        [folder] = tmp_path.iterdir()
        with suppress(HostError):
            list(HostedLoader(host, work))
        assert list(folder.rglob("left"))
    assert list(tmp_path.iterdir()) == []


def test_a_host_alone_removes_its_folder(work, tmp_path, monkeypatch):
    """As when the process that started it was killed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    host = Host(_fake(), work)
    assert len(list(tmp_path.iterdir())) == 1
    host.hang_up()
    host._process.wait(60)
    assert list(tmp_path.iterdir()) == []
    host.close()


# --- the comparison


def _crashes_in_the_third_epoch(work, epochs=iter((1, 2, 3))):  # noqa: B008 - of all calls together
    """Two for the check, so that the crash comes while all are timed."""
    return _dies(work) if next(epochs) == 3 else _fake_epoch(work)


def _numbers(work):
    return [64, 6]


def _refuses(work):
    raise ValueError("this format cannot be made")


def _six_photos(root, n_photos, **options):
    for number in range(n_photos):
        (root / pictures.picture_key(number)).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (300, 200), (40 * number, 90, 120)).save(root / pictures.picture_key(number))
    return root


@pytest.mark.exhaustive
def test_who_is_missing_or_breaks_is_told_and_the_rest_go_on(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    monkeypatch.setattr(peers, "OWN", ())
    monkeypatch.setattr(peers, "LIMITS", ())
    monkeypatch.setattr(peers, "make_photos", _six_photos)
    monkeypatch.setattr(peers, "_MIN_STEADY_S", dict.fromkeys(peers._MIN_STEADY_S, 1e-9))  # at any speed, an epoch
    fakes = [
        _fake("right"),
        replace(_fake("absent"), modules=("no_such_module_here",), install="pip install no-such"),
        Peer("refusing", JPEG_FILES, True, "", (), loader=_raises, prepare=_refuses),
        replace(_fake("crashing"), loader=_crashes_in_the_third_epoch),
        replace(_fake("counting"), loader=_numbers),
    ]
    frame = compare_peers(n_photos=6, rounds=2, peers=fakes, progress=False)
    assert set(frame["variant"]) == {BASELINE, "right"}
    # A first run reads a second epoch to plan by; the others need one here, also after the crash began it all anew.
    assert (frame.loc[~frame["is_warmup"], "n_images"] == 6).all()
    assert frame.loc[frame["is_warmup"], "n_images"].isin([6, 12]).all()
    assert frame.groupby("variant").size().tolist() == [3, 3]
    assert (frame["peak_mem_mb"] > 50).all()
    assert {f"{name} {row['state']}: {row['why']}" for name, row in left_out(frame).iterrows()} == {
        "absent missing: pip install no-such",
        "refusing broke: ValueError: this format cannot be made",
        "counting broke: gives int, not a pair (images, labels) with a tensor of images",
        "crashing broke: its process ended by SIGSEGV",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"profile": "moon"}, "imagenet, camera"),
        ({"peer_class": "jpeg"}, "jpeg-uint8, jpeg-float32"),
        ({"profile": "camera", "peer_class": "jpeg-uint8"}, "exclude each other"),
        ({"n_photos": 0}, "n_photos must be an integer >= 1, got 0"),
    ],
)
def test_bad_arguments_are_told(arguments, message):
    with pytest.raises(ValueError, match=message):
        compare_peers(**arguments)


def test_batches_are_of_64_and_epochs_of_several(monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    monkeypatch.setenv("LABKIT_SCALE", "laptop")
    monkeypatch.setattr(peers, "make_photos", lambda root, n_photos, **options: root)
    monkeypatch.setattr(peers, "repeat_photos", lambda photos, root, n_names: root)
    works = {name: peers.make_work(peer_class=name) for name in ("jpeg-uint8", "raw-float32", "camera-uint8")}
    assert {work.batch_size for work in works.values()} == {64}
    assert {work.min_steady_s for work in works.values()} == {1.0}
    assert [work.dtype for work in works.values()] == ["uint8", "float32", "uint8"]
    assert works["jpeg-uint8"].scratch == works["raw-float32"].scratch  # formats are built once for both
    assert works["camera-uint8"].root.name == "camera-128-x3"


def test_peers_of_another_class_are_told_if_they_were_asked_for(monkeypatch):
    monkeypatch.setitem(PEERS, "floats", replace(_fake("floats"), dtypes=("float32",)))
    for only, told in ((["floats"], {"floats": ("in another class", "JPEG files to float32")}), ([], {})):
        chosen, omitted = peers._choose_installed([PEERS["floats"], _fake()], only, CLASSES["jpeg-uint8"])
        assert [peer.name for peer in chosen] == ([] if only else ["fake"])
        assert omitted == told


def test_a_lock_that_cannot_be_watched_costs_no_rate(frame):
    class NotAllowed:
        def ask(self, command):
            raise HostError("GilError: py-spy cannot look into this process")

    class Allowed:
        def ask(self, command):
            return 12.5

    rows = {name: peers._PeerRun("labkit", _fake(name), host()) for name, host in
            {"ours": Allowed, "ours, sampling": NotAllowed}.items()}  # fmt: skip
    rows["slow"] = peers._PeerRun("peer", _fake("slow"), NotAllowed())
    omitted: dict = {}
    peers._add_lock_times(frame, rows, omitted)
    held_us = frame.groupby("variant")["gil_us_per_image"].first().dropna()
    assert held_us.to_dict() == {"ours": 12.5}
    assert omitted == {
        "ours, sampling": ("has no time under the GIL", "GilError: py-spy cannot look into this process")
    }
    assert peer_table(frame).loc["ours", "gil_us_per_image"] == 12.5


# --- the table, the classes and the plot, of runs with known rates

_RATES = {
    BASELINE: ("baseline", JPEG_FILES, True, 100),
    "slow": ("peer", JPEG_FILES, True, 200),
    "between": ("peer", JPEG_PACKED, None, 300),
    "sampling": ("peer", JPEG_FILES, False, 250),
    "raw": ("peer", RAW_PIXELS, True, 900),
    "ours": ("labkit", JPEG_FILES, True, 600),
    "ours, sampling": ("labkit", JPEG_FILES, False, 750),
    "ours, raw": ("labkit", RAW_PIXELS, False, 5000),
    DECODE_LIMIT: ("limit", JPEG_FILES, None, 1000),
    MEMCPY_LIMIT: ("limit", RAW_PIXELS, None, 10000),
}


@pytest.fixture
def frame() -> pd.DataFrame:
    rows = [
        {
            "variant": name, "kind": kind, "source": source, "antialias": flag, "round": number, "order": order,
            "is_warmup": number == 0, "n_images": 64, "images_per_s": rate * (1 + 0.1 * number), "cpu_s": 64 / rate,
            "peak_mem_mb": 100.0,
        }
        for number in range(4)
        for order, (name, (kind, source, flag, rate)) in enumerate(_RATES.items())
    ]  # fmt: skip
    return make_frame(rows, baseline=BASELINE, experiment="peers")


@pytest.mark.parametrize("from_file", [False, True])
def test_table_has_speedups_costs_and_shares_of_the_own_limit(frame, tmp_path, from_file):
    if from_file:
        frame = load_frame(save_frame(frame, tmp_path / "runs.csv"))
    table = peer_table(frame)
    assert table.index[0] == MEMCPY_LIMIT
    np.testing.assert_allclose(table["speedup"], [_RATES[name][3] / 100 for name in table.index])
    assert table["of_limit"].round(3).to_dict() == {
        name: round(rate / (10000 if source == RAW_PIXELS else 1000), 3)
        for name, (_, source, _, rate) in _RATES.items()
    }
    assert table.loc["ours", "cpu_s_per_1000"] == pytest.approx(1000 / 600)
    assert (table["rate_low"] < table["images_per_s"]).all()
    assert [table.loc[name, "antialias"] for name in ("slow", "sampling", "between")] == [True, False, None]


def test_table_has_the_first_start_and_what_each_loader_is(frame):
    frame["startup_s"], frame["first_batch_s"] = frame["round"].map({0: 3.0}).fillna(0.1), 0.5
    frame["version"], frame["differs"], frame["batch_size"] = "1.2", frame["variant"] + " differs", 64
    table = peer_table(frame)
    assert set(table["startup_s"]) == {3.5}
    assert table.loc["slow", ["version", "differs", "batch_size"]].tolist() == ["1.2", "slow differs", 64]


def test_floats_are_compared_with_what_can_be_written(frame):
    floats = frame.replace({"variant": {MEMCPY_LIMIT: WRITE_LIMIT}})
    table = peer_table(floats)
    assert table.loc["ours, raw", "of_limit"] == pytest.approx(0.5)
    assert table.loc["ours", "of_limit"] == pytest.approx(0.6)


def test_who_is_neither_counts_in_both_classes(frame):
    best = against_best(frame)
    assert best["best_peer"].to_dict() == {"ours": "between", "ours, sampling": "between", "ours, raw": ""}
    assert best.loc["ours", ["speedup", "ci_low", "ci_high"]].tolist() == pytest.approx([2, 2, 2])
    assert best.loc["ours, raw", "class"] == "raw pixels, not antialiased"
    assert best.loc["ours", "verdict"] == "faster"


def test_plot_has_every_loader_under_its_class_and_a_limit_a_source(frame):
    ax = plot_peers(frame)
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels[:3] == ["JPEG, antialiased", "ours", "slow"]
    assert set(_RATES) - {DECODE_LIMIT, MEMCPY_LIMIT} < set(labels)
    written = " ".join(text.get_text() for text in ax.texts)
    assert "decode limit 1,250" in written or "decode limit 1,200" in written
    assert "memcpy limit" in written
    plt.close(ax.figure)


# --- the command


def test_list_names_everyone_and_how_to_install(monkeypatch):
    monkeypatch.setitem(PEERS, "nobody's", replace(_fake("nobody's"), modules=("no_such_module_here",)))
    done = CliRunner().invoke(app, ["peers", "--list"])
    assert done.exit_code == 0
    assert all(name in done.output for name in (*PEERS, *CLASSES))
    assert all(peer.published in done.output for peer in PEERS.values())
    assert "missing (no_such_module_here): pip install fake" in done.output


@pytest.mark.parametrize(
    "arguments", [["--only", "nobody"], ["--profile", "moon"], ["--scale", "huge"], ["--class", "nothing"]]
)
def test_a_wrong_name_is_one_line_and_exit_code_2(arguments):
    done = CliRunner().invoke(app, ["peers", *arguments])
    assert done.exit_code == 2
    assert done.output.count("\n") == 1
    assert arguments[1] in done.output


@pytest.mark.slow
@pytest.mark.parametrize(("n_rounds", "interval"), [(1, ""), (3, " [2.00, 2.00]")])
def test_a_run_prints_the_table_and_writes_frame_and_picture(n_rounds, interval, frame, monkeypatch, tmp_path, capsys):
    frame = frame[frame["round"] <= n_rounds]
    frame.attrs["left_out"] = [{"name": "DALI", "state": "missing", "why": "pip install dali"}]
    monkeypatch.setattr(peer_report, "compare_peers", lambda *arguments, **options: frame)
    monkeypatch.setattr(peer_report.console, "width", 160)
    peer_report.run_peers("camera", results=tmp_path)
    printed = capsys.readouterr().out
    assert "nan" not in printed
    assert f"ours: 2.00 x{interval} the best peer of its class, between (JPEG, antialiased)" in printed
    assert "DALI missing: pip install dali" in printed
    assert "50%" in printed
    (written,) = tmp_path.glob("*/peers-camera.csv")
    assert len(load_frame(written)) == len(frame)
    assert Image.open(written.with_suffix(".png")).width > 800
    assert f"wrote {written} and its .png" in printed.replace("\n", "")


@pytest.mark.slow
def test_a_run_can_be_added_to_a_collection(frame, monkeypatch, tmp_path):
    collection = tmp_path / "all.csv"
    append_runs(frame.assign(env_id="elsewhere", peer_class="raw-uint8"), collection)
    monkeypatch.setattr(
        peer_report, "compare_peers", lambda *arguments, **options: frame.assign(peer_class="raw-uint8")
    )
    monkeypatch.setattr(peer_report.console, "width", 160)
    peer_report.run_peers("imagenet", peer_class="raw-uint8", append=collection, results=tmp_path)
    assert [machine for machine, _, _ in comparisons(load_frame(collection))] == ["elsewhere", env_id()]
