"""`lk.watch` sees what training waits for: known stalls, every kind of loader, a device, ranks. It changes nothing."""

import base64
import inspect
import json
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from xml.etree import ElementTree

import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, dataloader

import labkit as lk
from labkit.errors import NothingSeen
from labkit.watching.advice import SHORT_NAMES, Costs, advise
from labkit.watching.device import DeviceTimes
from labkit.watching.loaders import LoaderTraits
from labkit.watching.ranks import combine, combine_ranks
from labkit.watching.report import SHARES
from labkit.watching.script import shown_command
from tests.watching.trained import optimizer, train, watched_while


def numbers(count, batch_size=2, **options):
    return DataLoader(TensorDataset(torch.zeros(count, 4)), batch_size, **options)


@pytest.fixture(scope="module")
def report():
    return watched_while(numbers(120)).report()


def drawing(page):
    """The first picture of a page."""
    encoded = re.search(r'src="data:image/svg\+xml;base64,([^"]+)"', page)[1]
    return ElementTree.fromstring(base64.b64decode(encoded))  # noqa: S314 - of our own


def methods():
    """Those that torch's loaders have, and what else is changed."""
    classes = filter(inspect.isclass, vars(dataloader).values())
    kinds = [kind for kind in classes if kind.__module__ == dataloader.__name__]
    functions = [(kind, name) for kind in kinds for name, method in vars(kind).items() if inspect.isfunction(method)]
    others = [(lk.BatchLoader, "__iter__"), (torch.Tensor, "to")]
    own = {(torch.Tensor, name): value for name, value in vars(torch.Tensor).items()}  # "to" is none of them
    return {key: getattr(*key) for key in [*functions, *others]} | own


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
    @pytest.mark.parametrize(("stateful", "num_workers"), [(False, 0), (False, 1), (True, 1)])
    def test_are_watched_by_methods_of_torch_that_are_restored(self, num_workers, stateful):
        kind = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader if stateful else DataLoader
        before, parameters = methods(), signatures()
        loader = kind(TensorDataset(torch.zeros(40, 4)), 2, num_workers=num_workers)
        with lk.watch() as watched:
            assert signatures() == parameters
            for _ in range(2):
                train(loader)
        assert methods() == before
        assert loader.worker_init_fn is None
        found = watched.report()
        assert found is watched.report()
        row = found.loaders.iloc[0]
        assert isinstance(found.loaders, pd.DataFrame)  # since pandas is imported here
        assert (row["role"], row["n_batches"], row["num_workers"]) == ("training", 40, num_workers)
        assert row["getitem_ms"] >= 0
        assert set(found.spans["lane"]) == ({"host", "worker 0"} if num_workers else {"host"})

    @pytest.mark.parametrize(("kind", "made", "num_workers"), [
        (DataLoader, "before", 1), (OwnIterator, "before", 1), (OwnIterator, "within", 1), (Endless, "within", 0),
        (Endless, "within", 1),
    ])  # fmt: skip
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
            assert watched_while(each).report().loaders.iloc[0]["n_batches"] == n_batches

    @pytest.mark.parametrize("make", [
        lambda: DataLoader(TensorDataset(torch.zeros(40, 4)), 2),
        lambda: DataLoader(TensorDataset(torch.zeros(40, 4)), 2, num_workers=1, multiprocessing_context="fork"),
        lambda: lk.make_loader(TensorDataset(torch.zeros(40, 4)), batch_size=2, num_workers=0, collate_fn=list),
    ])  # fmt: skip
    def test_that_each_epoch_makes_anew_are_one(self, make):
        with lk.watch() as watched:
            for _ in range(3):
                train(loader := make())
                with torch.no_grad():
                    list(make())
        report = watched.report()
        assert report.loaders[["role", "n_batches"]].values.tolist() == [["training", 60], ["other", 60]]
        assert [epoch["n_batches"] for epoch in watched.epochs] == [20] * 3
        assert "These figures are of" not in " ".join(report.notes)
        del loader

    def test_of_a_training_that_are_left_out_are_told_in_words_json_and_html(self, tmp_path):
        with lk.watch() as watched:
            for n_samples in (40, 60, 20):
                train(numbers(n_samples, batch_size=2))
        report = watched.report()
        said = "These figures are of 30 of 60 batches of the training: those of DataLoader 1, one of 3 loaders"
        assert said in " ".join(report.notes)
        assert said in " ".join(json.loads(report.save_json(tmp_path / "report.json").read_text())["notes"])
        assert said in " ".join(report.save_html(tmp_path / "report.html").read_text().split())

    @pytest.mark.parametrize("is_late", [False, True])
    def test_without_an_optimizer_of_torch_are_told_from_a_validation(self, is_late):
        model, steps = optimizer()
        loader, validation = numbers(40, batch_size=2), numbers(120, batch_size=2)
        with lk.watch() as watched:
            for _ in range(2):
                for (x,) in loader:
                    model(x).mean().backward()
                if is_late:
                    steps.step()
                with torch.no_grad():
                    list(validation)
        report = watched.report()
        assert report.loaders[["role", "n_batches"]].values.tolist() == [["training", 40], ["other", 120]]

    def test_with_more_batches_than_the_one_that_steps_are_named(self):
        with lk.watch() as watched:
            train(numbers(20, batch_size=2))
            list(numbers(40, batch_size=2))
        said = "DataLoader 1 gave 20 batches, and the loader of these figures 10, but neither backward() nor an opt"
        assert said in " ".join(watched.report().notes)

    @pytest.mark.parametrize("num_workers", [0, 1])
    def test_that_were_begun_before_are_seen_and_told(self, num_workers):
        batches = iter(numbers(40, batch_size=2, num_workers=num_workers))
        next(batches)
        with lk.watch() as watched:
            train(batches)
        report = watched.report()
        [row] = report.loaders.itertuples()
        assert (row.num_workers, row.n_batches, row.role) == (num_workers, 19, "training")
        assert watched.epochs[-1]["n_batches"] == 19
        assert "DataLoader 0 was begun before it was observed" in " ".join(report.notes)
        assert ("how its workers make batches is not known" in " ".join(report.notes)) == bool(num_workers)

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
        assert repr(watched.report()).startswith("labkit watch: 6 steps")

    def test_draws_where_the_time_of_a_batch_goes(self, report):
        drawn = "".join(drawing(report._repr_html_()).itertext())
        large = [name for name, lost_s in report.costs.lost_s.items() if lost_s > 0.1 * report.costs.together]
        assert [name for name in ("compute", *large) if SHORT_NAMES[name] not in drawn] == []

    def test_promises_nothing_where_the_ceiling_may_be_none(self, report):
        promising = replace(report, ceiling=2.0, ceiling_low=1.5, ceiling_high=2.5)
        assert "This alone: up to " in " ".join(repr(promising).split())
        found = replace(report, ceiling=2.0, ceiling_low=0.7, ceiling_high=43.0)
        assert "This alone:" not in repr(found)
        assert "too few steps were seen to say what it brings" in " ".join(map(str, found.recommendations))
        assert not [told for told in map(str, found.recommendations) if "Should bring" in told]
        assert found.to_dict()["recommendation"]["speedup"] == 1.0

    def test_can_be_made_of_a_step_that_copies_fill_whole(self):
        with lk.watch() as watched:
            train(numbers(60))
            watched.record.device.copy_s.append(1000.0)
        found = watched.report()
        assert "the step is hardly anything beside it" in repr(found)
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

    @pytest.fixture
    def busy(self, monkeypatch):
        """A device whose events are reached at once; another thread goes on as it is asked."""
        found = {"record": lambda: None, "synchronize": lambda: None, "elapsed_time": lambda other: 1000.0}
        event = SimpleNamespace(query=lambda: time.sleep(0) or True, **found)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)

    def test_is_not_asked_where_there_is_none(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
        times = DeviceTimes()
        stop = times.start()
        times.received(times.asked())
        torch.zeros(1).to(torch.float64)
        assert not sampling()
        stop()
        assert (times.idle_s, times.copy_s, times.busy) == ([], [], [])

    @pytest.mark.parametrize("num_workers", [0, 1])
    def test_whose_simulated_clock_stands_still_has_shares_of_real_time(self, num_workers):
        """They were divided by the seconds of that clock: a ZeroDivisionError."""
        with lk.simulated_cuda():
            torch.zeros(1, device="cuda")
            report = watched_while(numbers(60, num_workers=num_workers), lambda batch: time.sleep(0.01)).report()
        assert report.shares == dict.fromkeys(SHARES, 0.0) | {"compute": 1.0}
        assert 0 <= report.others_share < 1.5
        assert report.resources.seconds > 0.3

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

    def test_may_be_copied_to_by_threads_of_a_script_at_once(self, busy, monkeypatch):
        """Without a lock two threads took the same event from the list, and the script's `.to()` raised IndexError."""
        monkeypatch.setattr(torch.cuda, "utilization", lambda: 0)
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
    def test_is_as_busy_as_the_driver_says_until_it_fails(self, busy, monkeypatch, answers):
        """As NVML does where its package is missing."""
        left, failed = list(answers), threading.Event()

        def answer():
            if not left:
                failed.set()
                raise ModuleNotFoundError("pynvml")
            return left.pop(0)

        monkeypatch.setattr(torch.cuda, "utilization", answer)
        times = DeviceTimes()
        stop = times.start()
        times.received(times.asked())
        assert [thread.daemon for thread in sampling()] == [True]
        assert failed.wait(20)
        stop()
        assert times.busy == [answer / 100 for answer in answers]
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
        monkeypatch.setattr("labkit.watching.ranks.children", lambda parent: [parent])  # the other rank runs
        return lambda: list(tmp_path.glob("labkit-watch-*"))

    def test_report_once_with_the_figures_of_the_one_that_waits_longest(self, report, folders):
        costs = replace(report.costs, fetch=9.0)
        pace = report.pace | {"ready": 0.25, "step_p50_ms": 1e-3 * report.pace["step_p50_ms"]}
        shares = dict.fromkeys(SHARES, 0.0) | {"fetch": 1.0}
        tables = report.tables | {"epochs": [row | {"ready": 0.25} for row in report.tables["epochs"]]}
        slow = replace(report, shares=shares, costs=costs, ceiling=7.0, pace=pace, tables=tables)
        slow = replace(slow, resources=replace(report.resources, step_queued=0.9), slow="3 of 9", n_batches=77)
        report = replace(report, notes=["It hung: there."])
        for hands_over, tells in (slow, report), (report, slow):
            assert combine_ranks(hands_over, SECOND) is None
            [folder] = folders()
            assert (folder.stat().st_mode & 0o777, folder.stat().st_uid) == (0o700, os.getuid())
            found = combine_ranks(tells, FIRST)
            assert folders() == []
            assert (found.shares, found.costs, found.ceiling) == (slow.shares, slow.costs, 7.0)
            assert found.resources == replace(slow.resources, n_sharing=2)
            assert (found.slow, found.n_batches) == ("3 of 9", 77)
            assert [note for note in found.notes if "It hung" in note] == [
                f"Rank {int(tells is slow)}: It hung: there."
            ]
            assert found.ranks["rank"].tolist() == [0, 1]
            assert found.ranks["compute"].tolist() == [tells.shares["compute"], hands_over.shares["compute"]]
            waits, steps = int(hands_over is slow), int(tells is slow)
            assert f"figures of rank {waits}, which waits longest for data. " in found.notes[-1]
            assert f"The slowest step is that of rank {steps}, " in found.notes[-1], (
                "with the fastest it waits for data"
            )
            assert found.ranks["ready"].tolist() == [tells.pace["ready"], hands_over.pace["ready"]]
            assert found.ranks["step_p50_ms"].tolist() == [tells.pace["step_p50_ms"], hands_over.pace["step_p50_ms"]]
            assert (found.pace, found.batch) == (slow.pace, slow.batch)
            assert found.epochs["ready"].tolist() == [0.25]

    @pytest.mark.parametrize(("other", "n_sharing"), [({0, 1}, 2), ({1, 2}, 2), ({2}, 1)])
    def test_are_no_other_programs_to_one_another_and_share_cores(self, report, folders, other, n_sharing):
        first = replace(report, affinity=frozenset({0, 1}), cpu_share=0.9, others_share=0.5)
        second = replace(first, affinity=frozenset(other), cpu_share=0.8, others_share=0.45)
        assert combine_ranks(second, SECOND) is None
        found = combine_ranks(first, FIRST)
        assert found.others_share == pytest.approx(0.5 - (0.8 - 0.45))
        assert found.resources.n_sharing == n_sharing

    def test_that_ran_one_after_the_other_share_nothing(self, report, folders):
        first = replace(report, cpu_share=0.9, others_share=0.5, observed_s=(10.0, 20.0))
        for observed_s, n_sharing, others_share in (
            ((20.0, 30.0), 1, 0.5), ((18.0, 30.0), 1, 0.42), ((11.0, 20.0), 2, 0.14),
        ):  # fmt: skip
            assert combine_ranks(replace(first, observed_s=observed_s), SECOND) is None
            found = combine_ranks(first, FIRST)
            assert found.resources.n_sharing == n_sharing
            assert found.others_share == pytest.approx(others_share)

    @pytest.mark.parametrize(("other", "n_workers"), [({0}, 4), ({1}, 8)])
    def test_of_mp_spawn_are_advised_the_cores_that_each_has_for_itself(self, report, monkeypatch, other, n_workers):
        """No variable of the environment tells them how many they are."""
        monkeypatch.setattr("labkit.util.ranks.usable_cores", lambda: 8)
        costs = Costs(**dict.fromkeys(Costs.__dataclass_fields__, 0.0) | {
            "step": 0.01, "prepare": 0.2, "together": 0.21, "making": 0.2,
        })  # fmt: skip
        shares = {"compute": 0.05, **costs.lost}
        alone = replace(
            report, costs=costs, shares=shares, affinity=frozenset({0}), ceiling_low=21.0, ceiling=21.0,
            recommendations=advise(costs, LoaderTraits(num_workers=0)),
        )  # fmt: skip
        second = replace(alone, affinity=frozenset(other))
        found = combine("process", [("SpawnProcess-1", alone), ("SpawnProcess-2", second)], "{}", "train.py")
        assert found.recommendation.settings["num_workers"] == n_workers

    @pytest.mark.parametrize("taken", ["open to others", "a link", "a file"])
    def test_do_not_use_a_folder_that_others_may_write_to(self, report, folders, tmp_path, taken):
        assert combine_ranks(report, SECOND) is None
        [folder] = folders()
        (folder / "1.report").unlink()
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
        monkeypatch.setattr("labkit.watching.ranks.read_text", lambda path: f"1 (torchrun) {20 * '1 '}")
        assert combine_ranks(report, SECOND) is None
        assert [len(list(folder.iterdir())) for folder in folders()] == [1, 1]

    @pytest.mark.parametrize(
        "ranks",
        [
            {"LOCAL_WORLD_SIZE": "2"},
            {"LOCAL_WORLD_SIZE": ""},
            {**FIRST, "LOCAL_WORLD_SIZE": "0"},
            {**FIRST, "RANK": "-1", "LOCAL_RANK": "-1"},
        ],
    )
    def test_of_another_program_are_none(self, report, folders, ranks):
        """Left over in the environment, or empty: nobody is waited for, and nobody else reports."""
        assert combine_ranks(report, ranks) is report
        assert folders() == []

    def test_that_do_not_run_are_not_waited_for(self, report, folders, monkeypatch):
        monkeypatch.setattr("labkit.watching.ranks.children", lambda parent: [os.getpid()])
        assert combine_ranks(report, FIRST).ranks["rank"].tolist() == [0]
        assert combine_ranks(report, SECOND) is report
        assert folders() == []
