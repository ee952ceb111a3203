"""compare_peers: who takes part in which class, how a run is timed in its host, and what the results say."""

import os
import re
import signal
import tempfile
import time
from dataclasses import replace
from functools import partial

import cloudpickle
import numpy as np
import pandas as pd
import psutil
import pytest
import torch
from PIL import Image

from labkit.app.cli import main
from labkit.course import (
    PEERS,
    Peer,
    compare_peers,
    comparisons,
    plot_peers,
    stored_runs,
)
from labkit.errors import HostError
from labkit.measure.frames import MEASURE_VERSION, load_frame, make_frame, save_frame
from labkit.measure.usage import CoreTime, excluded_pids
from labkit.peers import command, photos, ranking, registry
from labkit.peers.adapters.own import (
    BASELINE,
    BEST_DATALOADER,
    DATALOADER,
    DECODE_LIMIT,
    LIMITS,
    MEMCPY_LIMIT,
    NAIVE,
    OWN,
    WRITE_LIMIT,
)
from labkit.peers.check import picture_key
from labkit.peers.host import Host
from labkit.peers.peer import CLASSES, FLOAT32, JPEG_FILES, JPEG_PACKED, PROFILES, RAW_PIXELS, SCALED, Work
from labkit.peers.ranking import leaders, left_out, peer_table
from labkit.peers.registry import make_work
from labkit.peers.run import PeerRun
from tests.paths import invoke
from tests.timing import leave_memory_out

cloudpickle.register_pickle_by_value(__import__(__name__, fromlist=["_"]))  # hosts cannot import test modules


def fake(name="fake", loader=None, modules=(), **details) -> Peer:
    return Peer(name, JPEG_FILES, True, "pip install fake", modules, loader, **details)


# --- classes: what is read and what is delivered


def test_a_class_has_one_kind_of_source_one_dtype_and_its_own_limits():
    everyone = (*PEERS.values(), *OWN, *LIMITS)
    members = {name: {peer.name for peer in everyone if of.admits(peer)} for name, of in CLASSES.items()}
    assert members["camera"] == members["imagenet"] == members["jpeg-uint8"] | members["raw-uint8"]
    for name in CLASSES.keys() - PROFILES:
        assert {PEERS[peer].source == RAW_PIXELS for peer in members[name] & set(PEERS)} == {name.startswith("raw")}
        assert (DECODE_LIMIT in members[name]) == (not name.startswith("raw"))
    assert "turboloader raw" in members["raw-float32"] - members["raw-uint8"]
    assert {"FFCV raw", "labkit PixelStore"} <= members["raw-float32"] & members["raw-uint8"]
    assert MEMCPY_LIMIT in members["raw-uint8"] - members["raw-float32"]
    assert WRITE_LIMIT in members["raw-float32"] - members["raw-uint8"]


# --- a run: which batches are timed and how many epochs it takes, with a clock that only the loader moves


@pytest.fixture
def read(tmp_path, request):
    """Reads a run over 128 photos in batches of 8, which come after these seconds, and says how many epochs it took.

    Between the start and the first batch `before_s` go by, and after the last one `end_s`.
    """
    (tmp_path / "photos").mkdir()
    for number in range(128):
        (tmp_path / "photos" / f"{number:03d}.jpg").touch()
    seconds = [0.0]

    def run(waits_s, *, before_s=0.0, end_s=0.0, min_steady_s=1.0, num_workers=2):
        epochs = []

        def loader(work):
            epochs.append(1)
            for wait_s in waits_s:
                seconds[0] += wait_s
                yield np.zeros((8, 2, 2, 3))
            seconds[0] += end_s

        work = Work(tmp_path / "photos", tmp_path, batch_size=8, min_steady_s=min_steady_s, num_workers=num_workers)
        a_run = PeerRun(fake(request.node.nodeid, loader), work, lambda: seconds[0])
        a_run.start()
        seconds[0] += before_s
        assert a_run.take_first() == (8 if waits_s else 0)
        if waits_s:
            a_run.take_rest()
        return a_run, len(epochs)

    return run


@pytest.fixture
def read_once(read):
    """The first run of this loader planned one epoch for those that follow."""
    read([1.0] * 16, min_steady_s=1e-9)
    return read


def test_the_first_quarter_of_an_epoch_and_its_end_are_not_timed(read_once):
    timing, n_epochs = read_once([5.0, 0.0, 0.0, 1.0] + 12 * [0.25], end_s=7.0)
    found = timing.columns(4.0, CoreTime(6.0, 0.8))
    assert n_epochs == 1
    assert found["images_per_s"] == pytest.approx(8 / 0.25)
    assert (found["n_steady_batches"], found["n_steady_images"], found["steady_s"]) == (12, 96, pytest.approx(3.0))
    assert found["is_steady"]
    costs = [found[name] for name in ("cpu_s", "others_cpu_s", "steal_s")]
    assert costs == pytest.approx([4.0 * 96 / 128, 2.0 * 96 / 128, 0.8 * 96 / 128])


@pytest.mark.parametrize(("num_workers", "n_steady"), [(1, 12), (3, 10), (8, 8)])
def test_the_queue_settles_by_whole_rounds_of_the_workers(read_once, num_workers, n_steady):
    timing, _ = read_once(16 * [0.25], num_workers=num_workers)
    assert timing.columns(0.0, CoreTime(0.0, 0.0))["n_steady_batches"] == n_steady


@pytest.mark.parametrize("before_s", [0.0, 50.0])
def test_a_loaders_first_run_plans_the_epochs_of_all_by_its_second_epoch(read, before_s):
    """It may compile in its first, or start workers. Twelve batches are timed: 0.3 s. Slow runs are not cut short."""
    assert read(16 * [0.025], before_s=before_s)[1] == 2
    timing, n_epochs = read(16 * [0.025])
    found = timing.columns(0.0, CoreTime(0.0, 0.0))
    assert found["images_per_s"] == pytest.approx(8 / 0.025)
    assert found["n_steady_images"] == 4 * 96
    assert n_epochs == read(16 * [0.1])[1] == 4


def test_an_epoch_of_few_batches_counts_as_a_whole(read_once):
    found = read_once([2.0, 1.0, 1.0])[0].columns(3.0, CoreTime(0.0, 0.0))
    assert not found["is_steady"]
    assert found["images_per_s"] == pytest.approx(24 / 4.0)
    assert found["cpu_s"] == 3.0


def test_a_queue_that_was_full_asks_for_no_endless_epochs(read):
    assert read([1.0] + 15 * [1e-9])[1] == 2
    assert read([1.0] + 15 * [1e-9])[1] == 4
    assert read([])[0].n_images == 0


# --- hosts: a process for each loader


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Work:
    root = tmp_path_factory.mktemp("photos")
    Image.new("RGB", (30, 20)).save(root / "0.jpg")
    return Work(root, root, num_workers=2)


def hosts() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "labkit.peers.host" in child.cmdline()]


def counts(work):
    print("what a loader prints does not disturb")
    yield from (torch.zeros(n, 3, 8, 8, dtype=torch.uint8) for n in (3, 3, 1))


def dies(work):
    os.kill(os.getpid(), signal.SIGSEGV)
    yield


def sleeps(work):
    time.sleep(60)
    yield


def raises(work):
    raise OSError("no such\nthing")
    yield


def raises_in_stages(work):
    raise ExceptionGroup("stages failed", [ExceptionGroup("the second", [OSError("no ffmpeg")])])
    yield


def test_a_hosted_epoch_tells_its_costs_and_a_host_left_alone_ends(work, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Host(fake(loader=counts), work, timeout_s=60) as host:
        assert list(host) == [3, 11]  # the first run reads two epochs
        assert host.cpu_s >= 0
        assert host.peak_mem_mb > 10
        assert host.page_cache in ("warm", "unknown")
        assert len(list(tmp_path.iterdir())) == 1
        assert excluded_pids == {process.pid for process in hosts()} != set()
        host.hang_up()  # as when the process that started it was killed
        psutil.wait_procs(hosts(), 60)
        assert list(tmp_path.iterdir()) == []
    assert hosts() == []
    assert not excluded_pids


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("loader", "message"),
    [(dies, "ended by SIGSEGV"), (sleeps, "no answer"), (raises, "such"), (raises_in_stages, "^OSError: no ffmpeg$")],
)
def test_what_goes_wrong_in_a_host_is_one_line(work, loader, message):
    with Host(fake(loader=loader), work, timeout_s=20 if loader != sleeps else 4) as host:
        with pytest.raises(HostError, match=message) as caught:
            list(host)
        assert "\n" not in str(caught.value)
    assert hosts() == []


# --- the comparison


class AnsweringHost(Host):
    """A host in this process, which answers at once, or breaks where the name of its peer says."""

    def __init__(self, peer: Peer, work: Work, timeout_s: float):
        self.peer, self.batch_size, self.num_workers = peer, work.batch_size, work.num_workers

    def hang_up(self) -> None: ...

    def close(self) -> None: ...

    def ask(self, command: str):
        if self.peer.name.endswith(command):
            raise HostError(f"broke at {command}")
        figures = {"images_per_s": 100.0, "steady_s": 1.0, "is_steady": True, "n_steady_images": 4, "cpu_s": 0.5}
        return {"take_first": 2, "take_rest": (4, figures)}.get(command)


@pytest.fixture
def answering(monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    monkeypatch.setattr(registry, "Host", AnsweringHost)
    monkeypatch.setattr(photos, "make_photos", lambda root, n_photos, **options: root)
    monkeypatch.setattr(registry, "make_pictures", lambda work: work.root)
    leave_memory_out(monkeypatch)
    return partial(compare_peers, peer_class="jpeg-uint8", n_photos=6, rounds=2, progress=False)


def test_who_cannot_take_part_is_told_and_the_rest_go_on(answering):
    fakes = [
        fake("right"), fake("absent", modules=("no_such_module_here",)), fake("breaks at prepare"),
        fake("breaks at check"), fake("breaks at start"), fake("floats", dtypes=(FLOAT32,)),
        fake("scaling", decodes=SCALED),
    ]  # fmt: skip
    told = {
        "absent": ("missing", "pip install fake"),
        **{f"breaks at {command}": ("broke", f"broke at {command}") for command in ("prepare", "check", "start")},
    }
    of_floats = {"floats": ("in another class", "JPEG files to float32")}
    for only, more in (((), {}), ([peer.name.upper() for peer in fakes], of_floats)):
        frame = answering(peers=fakes, only=only)
        found = {name: (row["state"], row["why"]) for name, row in left_out(frame).iterrows()}
        assert found == {**told, **more}
        by_kind = {kind: set(runs["variant"]) for kind, runs in frame.groupby("kind")}
        own = {peer.name for peer in OWN if peer.source == JPEG_FILES}
        assert by_kind == {
            "baseline": {BASELINE}, "dataloader": {BEST_DATALOADER}, "peer": {"right", "scaling"}, "labkit": own,
            "limit": {DECODE_LIMIT},
        }  # fmt: skip
        assert frame.groupby("variant").size().unique().tolist() == [3]  # all share every round
        scaled = set(frame.loc[frame["decoded_at"] == "scaled", "variant"])
        assert scaled == {"scaling", "labkit BatchLoader", "labkit BatchLoader, antialias"}


def test_nothing_is_compared_without_the_baseline(answering, monkeypatch, tmp_path):
    monkeypatch.setattr(registry, "NAIVE", replace(NAIVE, name="breaks at check"))
    monkeypatch.chdir(tmp_path)
    done = invoke(main, ["peers", "--only", "timm", "--rounds", "2"])
    assert (done.exit_code, done.output.count("\n")) == (2, 1)
    assert "breaks at check, which all others are compared with, does not run: broke at check" in done.output


def test_batches_are_of_64_and_epochs_of_several(monkeypatch, answering):
    monkeypatch.setenv("LABKIT_SCALE", "laptop")
    monkeypatch.setattr(photos, "repeat_photos", lambda photos, root, n_names: root)
    works = {name: make_work(peer_class=name) for name in ("jpeg-uint8", "raw-float32", "camera-uint8")}
    assert {(work.batch_size, work.min_steady_s) for work in works.values()} == {(64, 1.0)}
    assert [work.dtype for work in works.values()] == ["uint8", "float32", "uint8"]
    assert works["jpeg-uint8"].scratch == works["raw-float32"].scratch  # formats are built once for both
    assert works["camera-uint8"].root.name == "camera-128-x3"


def crashes_in_the_third_epoch(work, epochs=iter((1, 2, 3))):  # noqa: B008 - of all calls together
    """Two for the check, so that the crash comes while all are timed."""
    return dies(work) if next(epochs) == 3 else NAIVE.loader(work)


def six_photos(root, n_photos, **options):
    for number in range(n_photos):
        (root / picture_key(number)).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (300, 200), (40 * number, 90, 120)).save(root / picture_key(number))
    return root


@pytest.mark.exhaustive
def test_real_hosts_that_crash_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    monkeypatch.setenv("LABKIT_SCALE", "ci")
    monkeypatch.setattr(registry, "OWN", ())
    monkeypatch.setattr(registry, "LIMITS", ())
    monkeypatch.setattr(photos, "make_photos", six_photos)
    numbers = fake("counting", lambda work: [64, 6])
    crashing = fake("crashing", crashes_in_the_third_epoch)
    frame = compare_peers(n_photos=6, rounds=2, peers=[fake("right", NAIVE.loader), crashing, numbers], progress=False)
    assert frame.groupby("variant").size().to_dict() == {BASELINE: 3, BEST_DATALOADER: 3, "right": 3}
    assert (frame["n_images"] % 6 == 0).all()  # whole epochs, also after the crash began it all anew
    assert (frame["peak_mem_mb"] > 50).all()
    assert left_out(frame)["why"].to_dict() == {
        "counting": "gives int, not a pair (images, labels) with a tensor of images",
        "crashing": "its process ended by SIGSEGV",
    }


# --- the table, the classes and the plot, of runs with known rates

RATES = {
    BASELINE: ("baseline", JPEG_FILES, True, 100),
    "slow": ("peer", JPEG_FILES, True, 200),
    "between": ("peer", JPEG_PACKED, None, 300),
    "sampling": ("peer", JPEG_FILES, False, 250),
    "raw": ("peer", RAW_PIXELS, True, 900),
    "scaled": ("peer", JPEG_FILES, True, 400),
    "ours": ("labkit", JPEG_FILES, True, 600),
    "ours, scaled": ("labkit", JPEG_FILES, True, 800),
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
            "decoded_at": "" if source == RAW_PIXELS else "scaled" if name.endswith("scaled") else "full size",
            "is_warmup": number == 0, "n_images": 64, "images_per_s": rate * (1 + 0.1 * number), "cpu_s": 64 / rate,
            "peak_mem_mb": 100.0,
        }
        for number in range(4)
        for order, (name, (kind, source, flag, rate)) in enumerate(RATES.items())
    ]  # fmt: skip
    return make_frame(rows, baseline=BASELINE, experiment="peers")


def test_the_table_has_speedups_costs_and_shares_of_the_own_limit(frame, tmp_path):
    frame["startup_s"], frame["first_batch_s"] = frame["round"].map({0: 3.0}).fillna(0.1), 0.5
    frame = load_frame(save_frame(frame, tmp_path / "runs.csv"))
    table = peer_table(frame)
    assert table.index[0] == MEMCPY_LIMIT
    np.testing.assert_allclose(table["speedup"], [RATES[name][3] / 100 for name in table.index])
    shares = {name: rate / (10000 if source == RAW_PIXELS else 1000) for name, (_, source, _, rate) in RATES.items()}
    assert table["of_limit"].to_dict() == pytest.approx(shares)
    assert table.loc["ours", "cpu_s_per_1000"] == pytest.approx(1000 / 600)
    assert (table["rate_low"] < table["images_per_s"]).all()
    assert [table.loc[name, "antialias"] for name in ("slow", "sampling", "between")] == [True, False, None]
    assert [table.loc[name, "decoded_at"] for name in ("slow", "scaled", "raw")] == ["full size", "scaled", ""]
    assert set(table["startup_s"]) == {3.5}  # of the first start


def test_the_fastest_of_each_class_is_compared_with_the_next(frame):
    frame.loc[frame["variant"] == "between", "antialias"] = False
    assert leaders(frame) == {
        "JPEG decoded at full size, antialiased": "ours is 3.00 [3.00, 3.00] times as fast as slow",
        "JPEG decoded at full size, not antialiased": "ours, sampling is 2.50 [2.50, 2.50] times as fast as between",
        "JPEG decoded scaled, antialiased": "ours, scaled is 2.00 [2.00, 2.00] times as fast as scaled",
        "raw pixels, antialiased": "raw: 1,080 images per second",
        "raw pixels, not antialiased": "ours, raw: 6,000 images per second",
    }
    once = frame[frame["round"] <= 1]
    assert "ours was 3.00 times as fast as slow in one round, which has no interval" in leaders(once).values()


def test_the_plot_has_every_loader_and_the_ratio_to_a_dataloader(frame):
    ax = plot_peers(frame.replace({"variant": {"slow": BEST_DATALOADER}}))
    drawn = {label.get_text() for label in ax.get_yticklabels()}
    assert drawn == set(frame["variant"]) - {"slow", DECODE_LIMIT, MEMCPY_LIMIT} | {BEST_DATALOADER}
    shown = {text.get_text() for text in ax.texts}
    assert shown >= {"3.00x", "raw pixels, antialiased", "JPEG decoded scaled, antialiased"}


# --- what notebook 13 has stored


def test_the_stored_runs_are_of_one_machine_and_of_todays_loaders():
    stored = stored_runs()
    assert stored["env_id"].nunique() == 1
    described = {peer.name: peer for peer in (*PEERS.values(), *OWN, *LIMITS, NAIVE, DATALOADER)}
    for name, row in stored.fillna({"decoded_at": ""}).drop_duplicates("variant").set_index("variant").iterrows():
        assert (row["source"], row["decoded_at"]) == (described[name].source, described[name].decoded_at)
    in_notebook = CLASSES.keys() - PROFILES
    each = {name: (machine, set(own["peer_class"])) for machine, name, own in comparisons(stored)}
    assert each == {name: (stored["env_id"].iloc[0], {name}) for name in in_notebook}
    assert (stored["batch_size"].dropna() == 64).all()
    assert stored.loc[~stored["is_warmup"], "is_steady"].all()


def test_stored_figures_of_another_meaning_are_refused(frame, tmp_path, monkeypatch):
    monkeypatch.setattr(ranking, "NOTEBOOK_FOLDER", tmp_path)
    save_frame(frame.assign(measure=MEASURE_VERSION - 1), tmp_path / "13_peers.csv")
    with pytest.raises(ValueError, match=rf"13_peers\.csv.*measure \[{MEASURE_VERSION - 1}\].*run all classes again"):
        stored_runs()


# --- the command


def test_the_list_names_everyone_and_how_to_install(monkeypatch):
    monkeypatch.setitem(PEERS, "nobody's", fake("nobody's", modules=("no_such_module_here",)))
    done = invoke(main, ["peers", "--list"])
    assert done.exit_code == 0
    assert all(name in done.output for name in (*PEERS, *CLASSES))
    assert all(peer.published in done.output for peer in PEERS.values())
    assert "missing (no_such_module_here): pip install fake" in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--only nobody", "'nobody' is not a peer: choose from "),
        ("--own x --class raw-uint8", "--own reads your photos, and --class raw-uint8 others: pass one"),
        ("--class nothing", "jpeg-uint8, jpeg-float32, .*got 'nothing'"),
    ],
)
def test_a_wrong_name_is_one_line_with_what_is_accepted(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = invoke(main, ["peers", *arguments.split()])
    assert (done.exit_code, done.output.count("\n")) == (2, 1)
    assert re.search(said, done.output)


def test_the_classes_of_a_command_line_are_run_one_after_another(monkeypatch):
    ran = []
    monkeypatch.setattr(command, "run_peers", lambda name, **options: ran.append(name))
    for classes in ("", "all", "raw-uint8, jpeg-uint8"):
        assert invoke(main, ["peers", "--class", classes]).exit_code == 0
    assert ran == ["imagenet", *[name for name in CLASSES if name not in PROFILES], "raw-uint8", "jpeg-uint8"]
