"""`lk.watch` sees what training waits for: known stalls, every kind of loader, a device, ranks. It changes nothing."""

import inspect
import json
import math
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, dataloader

import labkit as lk
from labkit.errors import NothingSeen
from labkit.watching import advice
from labkit.watching.findings import SHARES
from labkit.watching.observe import Control
from labkit.watching.program import Replay, Steps
from labkit.watching.ranks import combine_ranks
from labkit.watching.script import shown_command
from labkit.watching.timings import DeviceTimes, gpu_utilization
from tests.stalling import KNOWN, RealClock


def optimizer():
    model = torch.nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), 1e-6)


def train(loader, step_s=0.0, epochs=1):
    model, steps = optimizer()
    for _ in range(epochs):
        for batch in loader:
            x = batch[0] if isinstance(batch, list | tuple) else batch
            steps.zero_grad()
            model(x.flatten(1)[:, :4].float()).mean().backward()
            steps.step()
            time.sleep(step_s)


def numbers(count, batch_size=2, **options):
    return DataLoader(TensorDataset(torch.zeros(count, 4)), batch_size, **options)


@pytest.fixture(scope="module")
def report():
    with lk.watch() as watched:
        train(numbers(120))
    return watched.report()


class Ended(Exception):
    pass


def end():
    raise Ended


# Copies are seen on CUDA only; here they belong to the step.
RUNGS = {name: rung for name, (_, rung) in KNOWN.items()} | {"copy": "none", "fetch and copy": "workers"}


@pytest.mark.exhaustive
@pytest.mark.alone
@pytest.mark.parametrize("replays", [False, True], ids=["observed", "replayed"])
@pytest.mark.parametrize("name", KNOWN)
def test_known_stalls_are_seen_in_real_time(name, replays, monkeypatch):
    monkeypatch.setattr(advice, "usable_cores", lambda: 2)
    stalls, clock, (_, steps) = KNOWN[name][0], RealClock(), optimizer()
    clock.round.value = 0
    loader, _ = stalls.loader_and_step(clock)
    with lk.watch() as watched, suppress(Ended):
        watched.observer.control = (partial(Replay, watched) if replays else Steps)(30, end, Control())
        for _ in loader:
            steps.step()
            clock.spend("step", stalls.step + stalls.copy)
    found = watched.report()
    truth = replace(stalls, copy=0.0, **clock.medians()).shares()
    assert sum(found.shares.values()) == pytest.approx(1)
    off = max(abs(found.shares[cause] - truth[cause]) for cause in SHARES)
    assert off < 0.05, f"found {found.shares}, true {truth}"
    assert found.recommendation.rung == RUNGS[name]
    if replays:
        assert not found.is_bound
        assert found.ceiling == pytest.approx(1 / truth["compute"], rel=0.1)


def methods():
    """Those that torch's loaders have, and what else is changed."""
    classes = filter(inspect.isclass, vars(dataloader).values())
    kinds = [kind for kind in classes if kind.__module__ == dataloader.__name__]
    functions = [(kind, name) for kind in kinds for name, method in vars(kind).items() if inspect.isfunction(method)]
    return {key: getattr(*key) for key in [*functions, (lk.BatchLoader, "__iter__"), (torch.Tensor, "to")]}


def signatures():
    return [str(inspect.signature(method)) for (kind, _), method in methods().items() if kind is not torch.Tensor]


class OwnIterator(DataLoader):
    """Makes its iterator itself, as some projects' loaders do."""

    def _get_iterator(self):
        return dataloader._MultiProcessingDataLoaderIter(self) if self.num_workers else super()._get_iterator()


class Endless(DataLoader):
    """Keeps one iterator for good, made as the loader is, as YOLO's and timm's loaders do."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.batches = super().__iter__()

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.batches)


class Numbers(IterableDataset):
    def __iter__(self):
        return (torch.full((4,), float(number)) for number in range(60))


class TestLoaders:
    @pytest.mark.parametrize("num_workers", [0, 1])
    @pytest.mark.parametrize("stateful", [False, True])
    def test_are_watched_by_methods_of_torch_that_are_restored(self, num_workers, stateful):
        kind = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader if stateful else DataLoader
        before, parameters = methods(), signatures()
        loader = kind(TensorDataset(torch.zeros(40, 4)), 2, num_workers=num_workers)
        with lk.watch() as watched:
            assert signatures() == parameters
            train(loader, 0.002, epochs=2)
        assert methods() == before
        assert loader.worker_init_fn is None
        found = watched.report()
        assert found is watched.report()
        row = found.loaders.iloc[0]
        assert (row["role"], row["n_batches"], row["num_workers"]) == ("training", 40, num_workers)
        assert row["getitem_ms"] >= 0
        assert set(found.spans["lane"]) == ({"host", "worker 0"} if num_workers else {"host"})

    @pytest.mark.parametrize("num_workers", [0, 1])
    @pytest.mark.parametrize("kind", [DataLoader, OwnIterator, Endless])
    @pytest.mark.parametrize("made", ["before", "within"])
    def test_that_start_their_workers_in_their_own_way_are_seen(self, kind, num_workers, made):
        def make():
            data, is_kept = TensorDataset(torch.zeros(40, 4)), num_workers > 0
            return kind(data, 2, num_workers=num_workers, persistent_workers=is_kept)

        loader = make() if made == "before" and kind is not Endless else None
        if loader is not None:
            list(loader)
        with lk.watch() as watched:
            loader = loader or make()
            for _ in loader:
                pass
        [row] = watched.report().loaders.itertuples()
        assert (row.n_batches, row.num_workers) == (20, num_workers)
        assert not [name for name in (*vars(loader), *vars(type(loader))) if "labkit" in name]

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_of_make_loader_are_seen_wherever_they_are_made(self, first_photos, num_workers):
        """In the block, before it, and before it with an epoch that has started its workers."""

        def make():
            data = lk.ImageDataset(lk.FolderStore(first_photos(12)), transform=lambda image: image[:, :8, :8])
            start_method = "fork" if num_workers else None
            return lk.make_loader(data, lk.LoaderConfig(2, num_workers, start_method=start_method))

        train(used := make())
        for loader in (None, make(), used):
            with lk.watch() as watched:
                train(loader := loader or make())
            [row] = watched.report().loaders.itertuples()
            assert (row.num_workers, row.n_batches, row.role) == (num_workers, 6, "training")
            loader.close()

    def test_of_iterables_and_batch_loader_are_seen(self, first_photos):
        loader = lk.BatchLoader(lk.FolderStore(first_photos(24)), size=16, batch_size=2, num_threads=1)
        for each, n_batches in ((DataLoader(Numbers(), 2, num_workers=2), 60), (loader, 12)):
            with lk.watch() as watched:
                train(each)
            assert watched.report().loaders.iloc[0]["n_batches"] == n_batches

    @pytest.mark.exhaustive
    def test_of_a_batch_loader_with_processes_are_its_own_alone(self, first_photos):
        """Not also of the loader that it has of torch's."""
        with lk.watch() as watched:
            train(lk.BatchLoader(first_photos(24), size=16, batch_size=2, num_processes=1))
        [row] = watched.report().loaders.itertuples()
        assert (row.loader, row.n_batches) == ("BatchLoader 0", 12)

    @pytest.mark.alone
    def test_of_one_step_are_told_from_a_validation(self):
        def loader(stage):
            def collate(samples):
                with clock(stage):
                    time.sleep(0.004)
                return torch.stack([sample[0] for sample in samples])

            return numbers(80, collate_fn=collate)

        clock, (model, steps) = lk.StageClock(), optimizer()
        first, second, other = loader("making"), loader("making"), loader("validation")
        with lk.watch() as watched:
            for number, (x, y) in enumerate(zip(first, second, strict=True)):
                with clock("step"):
                    model(x + y).mean().backward()
                    steps.step()
                    time.sleep(0.008)
                if number in (20, 30):
                    list(other)
        found = watched.report()
        assert list(found.loaders["role"]) == ["training", "training, too", "other"]
        expected = clock.seconds["step"] / (clock.seconds["step"] + clock.seconds["making"])
        assert found.shares["compute"] == pytest.approx(expected, abs=0.05)  # without the validation
        assert found.shares["fetch"] + found.shares["prepare"] == pytest.approx(1 - expected, abs=0.05)


class TestTheReport:
    def test_says_that_there_was_nothing_to_see(self):
        with lk.watch() as watched:
            pass
        with pytest.raises(NothingSeen, match=r"no torch\.utils\.data\.DataLoader"):
            watched.report()
        with lk.watch() as watched:
            next(iter(numbers(4)))
        with pytest.raises(NothingSeen, match=r"too few batches were seen \(1\)"):
            watched.report()

    def test_leaves_an_error_in_the_block_as_it_is(self):
        with pytest.raises(ZeroDivisionError), lk.watch() as watched:  # noqa: PT012 - what is raised in between
            train(numbers(20))
            1 / 0  # noqa: B018
        [_, few] = watched.report().sentences
        assert few.startswith("Only 6 batches were seen after the first: too few for a ceiling or advice.")

    @pytest.mark.parametrize(
        ("interval", "is_bound", "words", "title"),
        [
            ((1.5, 2.5), True, "at least 1.50x as fast (as it was seen, 2.00x [1.50, 2.50])", "at least 1.50x"),
            ((0.5, 9.0), True, "at least 1.00x as fast (as it was seen, 2.00x [0.50, 9.00])", "at least 1.00x"),
            ((math.nan, math.nan), True, "at least 2.00x as fast", "at least 2.00x"),
            ((1.5, 2.5), False, "2.00x [1.50, 2.50] as fast", "2.00x"),
            ((math.nan, math.nan), False, "2.00x as fast", "2.00x"),
        ],
    )
    def test_says_at_least_with_the_lower_end_of_the_interval(self, report, interval, is_bound, words, title):
        assert report.is_bound  # nothing was replayed
        assert report.sentences[1].startswith("Were data free, it would be at least ")
        low, high = interval
        unknown = {"cpu_share": None, "gpu_utilization": None}
        found = replace(report, ceiling=2.0, ceiling_low=low, ceiling_high=high, is_bound=is_bound, **unknown)
        assert found.sentences[1] == f"Were data free, it would be {words}."
        assert found.plot().get_title("left") == f"ceiling: {title}"
        assert "<img" in found._repr_html_()

    def test_can_be_made_of_a_step_that_copies_fill_whole(self):
        with lk.watch() as watched:
            train(numbers(60))
            watched.observer.device.copy_s.append(1000.0)
        found = watched.report()
        assert "hardly anything would be left" in repr(found)
        assert sum(found.shares.values()) == pytest.approx(1)
        json.dumps(found.to_dict(), allow_nan=False)

    @pytest.mark.parametrize(
        ("arguments", "shown"),
        [
            (["--epochs", "1", "--lr=0.1"], "--epochs 1 --lr=0.1"), (["--keys", "3"], "--keys 3"),
            (["--hub_token", "hf_abc", "x"], "--hub_token ... x"), (["--wandb-api-key=abc"], "--wandb-api-key=..."),
            (["password=abc", "--tokens-seen"], "password=... --tokens-seen"),
            (["https://me:secret@host/photos?sig=abc"], "'https://host/photos?...'"),
        ],
    )  # fmt: skip
    def test_shows_command_lines_without_secrets_and_home_folders(self, arguments, shown):
        assert shown_command("/home/somebody/train.py", arguments) == f"~/train.py {shown}"
        assert shown_command("timm.train", arguments, is_module=True) == f"-m timm.train {shown}"


class TestTheDevice:
    """What a CUDA device is seen to wait for, on the simulated device and on a real one."""

    def test_is_not_asked_where_there_is_none(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
        times = DeviceTimes()
        stop = times.start()
        times.received(times.asked())
        torch.zeros(1).to(torch.float64)
        with gpu_utilization() as samples:
            assert not sampling()
        stop()
        assert (times.idle_s, times.copy_s, samples) == ([], [], [])

    def test_does_not_stand_still_behind_a_kernel_and_copies_are_timed(self, cuda):
        torch.zeros(1, device="cuda")
        times = DeviceTimes()
        stop = times.start()
        try:
            large = torch.zeros(1 << 22).to("cuda")
            for _ in range(3):
                large = large * 2
            times.received(times.asked())
        finally:
            stop()
        assert [seconds > 0 for seconds in times.copy_s] == [True]
        assert times.idle_s == [pytest.approx(0, abs=1e-4)]

    def test_may_be_copied_to_by_threads_of_a_script_at_once(self, monkeypatch):
        """Without a lock two threads took the same event from the list, and the script's `.to()` raised IndexError."""
        reached_soon = SimpleNamespace(  # an event of a busy device
            record=lambda: None,
            query=lambda: time.sleep(0) or True,  # another thread goes on here
            synchronize=lambda: None,
            elapsed_time=lambda other: 1000.0,
        )
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "utilization", lambda: 0)
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: reached_soon)
        times, together = DeviceTimes(), threading.Barrier(8, timeout=60)
        stop = times.start()

        def train(_):
            for _ in range(100):
                together.wait()
                for _ in range(10):
                    times.received(times.asked())
                times.read()

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(train, range(8)))
        stop()
        assert times.idle_s == [1.0] * 8000

    @pytest.mark.parametrize("answers", [[100, 50, 0], []])
    def test_is_as_busy_as_the_driver_says_until_it_fails(self, monkeypatch, answers):
        """As NVML does where its package is missing."""
        left, failed = list(answers), threading.Event()

        def answer():
            if not left:
                failed.set()
                raise ModuleNotFoundError("pynvml")
            return left.pop(0)

        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "utilization", answer)
        with gpu_utilization() as samples:
            assert [thread.daemon for thread in sampling()] == [True]
            assert failed.wait(20)
        assert samples == [answer / 100 for answer in answers]
        assert not sampling()

    def test_is_asked_no_more_after_the_block(self, monkeypatch):
        asked = threading.Event()
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "utilization", lambda: asked.set() or 10)
        with gpu_utilization() as samples:
            assert asked.wait(20)
        assert set(samples) == {0.1}
        assert not sampling()


def sampling():
    return [thread for thread in threading.enumerate() if thread.name == "labkit-gpu-utilization"]


FIRST, SECOND = (
    {"RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"} for rank in ("0", "1")
)


class TestRanks:
    """Those of one start meet in a folder of their own, which no other user can take, and no earlier run."""

    @pytest.fixture(autouse=True)
    def folders(self, tmp_path, monkeypatch):
        """The meeting places that there are."""
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        monkeypatch.setattr("psutil.Process.children", lambda self: [self])  # the other rank runs
        return lambda: list(tmp_path.glob("labkit-watch-*"))

    def test_report_once_with_the_figures_of_the_one_that_waits_longest(self, report, folders):
        costs = replace(report.costs, fetch=9.0)
        slow = replace(report, shares=dict.fromkeys(SHARES, 0.0) | {"fetch": 1.0}, costs=costs, ceiling=7.0)
        for hands_over, tells in (slow, report), (report, slow):
            assert combine_ranks(hands_over, SECOND) is None
            [folder] = folders()
            assert (folder.stat().st_mode & 0o777, folder.stat().st_uid) == (0o700, os.getuid())
            found = combine_ranks(tells, FIRST)
            assert folders() == []
            assert (found.shares, found.costs, found.ceiling) == (slow.shares, slow.costs, 7.0)
            assert found.ranks["rank"].tolist() == [0, 1]
            assert found.ranks["compute"].tolist() == [tells.shares["compute"], hands_over.shares["compute"]]
            assert f"figures of rank {int(hands_over is slow)}" in found.notes[-1]

    @pytest.mark.parametrize("taken", ["open to others", "a link", "a file"])
    def test_do_not_use_a_folder_that_others_may_write_to(self, report, folders, tmp_path, taken):
        assert combine_ranks(report, SECOND) is None
        [folder] = folders()
        (folder / "1.json").unlink()
        folder.rmdir()
        if taken == "open to others":
            folder.mkdir()
            folder.chmod(0o777)
        elif taken == "a link":
            (tmp_path / "elsewhere").mkdir()
            folder.symlink_to(tmp_path / "elsewhere")
        else:
            folder.write_text("")
        for environment in (FIRST, SECOND):
            assert "Another user owns the folder" in combine_ranks(report, environment).notes[-1]

    def test_do_not_read_what_an_earlier_run_left(self, report, folders, monkeypatch):
        """A parent of the same number, started at another time, is another run."""
        assert combine_ranks(report, SECOND) is None
        monkeypatch.setattr("psutil.Process.create_time", lambda self: 1.0)
        assert combine_ranks(report, SECOND) is None
        assert [len(list(folder.iterdir())) for folder in folders()] == [1, 1]

    @pytest.mark.parametrize(
        "ranks",
        [
            {"LOCAL_WORLD_SIZE": "2"}, {"LOCAL_WORLD_SIZE": ""}, {**FIRST, "LOCAL_WORLD_SIZE": "0"},
            {"LOCAL_WORLD_SIZE": "-1", "RANK": "-1", "LOCAL_RANK": "-1"}, {**FIRST, "RANK": "-1", "LOCAL_RANK": "-1"},
        ],
    )  # fmt: skip
    def test_of_another_program_are_none(self, report, folders, ranks):
        """Left over in the environment, or empty: nobody is waited for, and nobody else reports."""
        assert combine_ranks(report, ranks) is report
        assert folders() == []

    def test_that_do_not_run_are_not_waited_for(self, report, folders, monkeypatch):
        monkeypatch.setattr("psutil.Process.children", lambda self: [])
        assert combine_ranks(report, FIRST).ranks["rank"].tolist() == [0]
        assert combine_ranks(report, SECOND) is report
        assert folders() == []
