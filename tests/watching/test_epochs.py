"""The epochs of a watched training in figures, against a stopwatch of the training's own; its pauses; its ranks."""

import io
import itertools
import json
import pickle
import statistics
import struct
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

import labkit as lk
from labkit.watching.accounts import find_accounts
from labkit.watching.report import SHARES
from labkit.watching.worker import BatchTiming, TimesReader
from tests.stalling import Clock
from tests.watching.test_files import observed
from tests.watching.trained import optimizer, train, watched_while


class Stopwatch:
    """Moves the only clock that there is, and notes by whom it was moved: an account of its own."""

    def __init__(self, monkeypatch):
        self.clock, self.noted = Clock(monkeypatch), []

    def spend(self, cause, seconds):
        self.clock.spend(cause, seconds)
        self.noted.append((cause, seconds))

    def seconds(self, cause):
        return [seconds for of, seconds in self.noted if of == cause]


@pytest.fixture
def stopwatch(monkeypatch):
    return Stopwatch(monkeypatch)


class Made(Dataset):
    """Samples that take as long as `spend` says, each a batch."""

    def __init__(self, n_samples, spend):
        self.n_samples, self.spend = n_samples, spend

    def __len__(self):
        return self.n_samples

    def __getitem__(self, index):
        self.spend(index)
        return torch.zeros(4)


def made_by(stopwatch, n_samples, fetch_s, prepare_s):
    def spend(index):
        stopwatch.spend("fetch", fetch_s)
        stopwatch.spend("prepare", prepare_s)

    return DataLoader(Made(n_samples, spend), 1)


class TestEachEpoch:
    def test_is_what_a_stopwatch_says_meanwhile_and_in_the_report(self, stopwatch):
        """A step takes half a second more in each epoch, the data as long in all; with a validation in the middle."""
        training, validation = made_by(stopwatch, 40, 0.3, 0.2), made_by(stopwatch, 5, 1.0, 1.0)
        (_, steps), live, truth = optimizer(), [], []
        with lk.watch() as watched:
            for epoch in range(3):
                for number, _ in enumerate(training):
                    steps.step()
                    stopwatch.spend("step", 1.0 + 0.5 * epoch + 0.01 * number)
                    if number == 20:
                        list(validation)
                live.append(watched.epochs[-1])
                truth.append(stopwatch.seconds("step")[-40:][4 if epoch == 0 else 1 :])
            left = iter(training)
            next(left)
            assert len(watched.epochs) == 3, "the fourth goes on"
        for epoch, (found, steps_s) in enumerate(zip(live, truth, strict=True)):
            together_s = statistics.fmean(steps_s) + 0.3 + 0.2
            expected = {"compute": statistics.fmean(steps_s) / together_s, "fetch": 0.3 / together_s}
            expected |= {"prepare": 0.2 / together_s, "copy": 0.0, "hand-over": 0.0, "start": 0.0}
            assert {name: found[name] for name in SHARES} == pytest.approx(expected, abs=1e-4)
            assert (found["epoch"], found["n_batches"], found["ready"]) == (epoch, 40, 0.0)
            assert found["validation_s"] == pytest.approx(5 * 2.0, rel=1e-3)
            for percentile in (50, 95, 99):
                expected_ms = 1e3 * np.percentile(steps_s, percentile)
                assert found[f"step_p{percentile}_ms"] == pytest.approx(expected_ms, rel=1e-4)
        report, every_s = watched.report(), [step_s for steps_s in truth for step_s in steps_s]
        assert report.epochs.to_dict("records") == live == watched.epochs
        mean_s = statistics.fmean(every_s)
        assert report.shares["compute"] == pytest.approx(mean_s / (mean_s + 0.3 + 0.2), abs=1e-4)
        assert report.pace["step_p50_ms"] == pytest.approx(1e3 * np.median(every_s), rel=1e-4)
        assert report.pace["validation_s"] == pytest.approx(30.0, rel=1e-3)
        assert "Validation took 30 s; the other figures leave this out." in " ".join(report.details)
        written = json.loads(json.dumps(report.to_dict(), allow_nan=False))
        assert [row["epoch"] for row in written["epochs"]] == [0, 1, 2]
        assert written["epochs"][1] == pytest.approx(live[1], abs=1e-6)
        assert written["pace"] == pytest.approx(report.pace)

    def test_is_without_its_checkpoints_but_with_other_outliers(self, stopwatch):
        class Weights:
            def __reduce__(self):
                stopwatch.spend("save", 7.0)
                return int, ()

        (_, steps), save = optimizer(), torch.save
        with lk.watch() as watched:
            assert torch.save is torch.serialization.save
            assert pickle.loads(pickle.dumps(torch.save)) is torch.save
            for number, _ in enumerate(made_by(stopwatch, 60, 0.0, 0.5)):
                steps.step()
                stopwatch.spend("step", 5.0 if number == 30 else 1.0)
                if number in (20, 40):
                    torch.save(Weights(), io.BytesIO())
            thread = threading.Thread(target=torch.save, args=(Weights(), io.BytesIO()))
            thread.start()
            thread.join()
        assert (torch.save, torch.serialization.save) == (save, save)
        [found] = watched.epochs
        assert found["checkpoint_s"] == pytest.approx(14.0, rel=1e-3), "another thread's holds nothing up"
        step_s = (55 * 1.0 + 5.0) / 56
        assert found["compute"] == pytest.approx(step_s / (step_s + 0.5), abs=1e-4)
        assert found["step_p99_ms"] > 1000
        assert found["step_p95_ms"] == pytest.approx(1000, rel=1e-4)
        assert "Checkpoints took 14 s" in " ".join(watched.report().details)

    @pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (2, True)])
    def test_alone_is_the_whole_report_and_others_are_of_their_own_workers(self, num_workers, persistent):
        loader = DataLoader(
            TensorDataset(torch.zeros(80, 4)), 2, num_workers=num_workers, persistent_workers=persistent
        )
        with lk.watch() as watched:
            train(loader)
            [found] = watched.epochs
            report = watched.report()
            assert {name: found[name] for name in SHARES} == pytest.approx(report.shares)
            assert {name: found[name] for name in report.pace} == pytest.approx(report.pace)
        with lk.watch() as watched:
            for n_epochs in (1, 2, 3):
                train(loader)
                assert len(watched.epochs) == n_epochs
            every = watched.epochs
            assert every == watched.epochs, "each is worked out once"
        assert [each["n_batches"] for each in every] == [40, 40, 40]
        assert [sum(each[name] for name in SHARES) for each in every] == pytest.approx([1.0] * 3)
        assert all(0 <= each["ready"] <= (num_workers > 0) for each in every)

    def test_counts_once_whether_it_has_its_own_loader_or_two(self):
        def loader():
            return DataLoader(TensorDataset(torch.zeros(40, 4)), 2)

        with lk.watch() as watched:
            for _ in range(3):
                train(loader())
        assert [(each["epoch"], each["n_batches"]) for each in watched.epochs] == [(0, 20), (1, 20), (2, 20)]
        with lk.watch() as watched:
            for _ in range(2):
                train(both[0] for both in zip(loader(), loader(), strict=True))
        assert len(watched.epochs) == 2

    def test_that_is_left_early_has_ended_when_the_next_one_begins(self):
        loader = DataLoader(TensorDataset(torch.zeros(80, 4)), 2)
        with lk.watch() as watched:
            for n_ended in (0, 1, 2):
                train(itertools.islice(loader, 20))
                assert len(watched.epochs) == n_ended
        assert [each["n_batches"] for each in watched.epochs] == [20, 20]


class TestReadiness:
    @pytest.mark.parametrize(
        ("times", "ready"),
        [
            # worker, begun, ready, asked for, received, batches in the queue: the first one of an epoch does not count
            ([(0, 0, 3, 1, 3, 0), (1, 0, 3, 5, 5, 1), (0, 3, 9, 7, 9, 0), (1, 3, 6, 11, 11, 1)], 2 / 3),
            # one is in the queue, but it is not the one that is next in order
            ([(0, 0, 3, 1, 3, 0), (1, 0, 8, 5, 8, 1), (0, 3, 5, 9, 9, 1), (1, 8, 9, 10, 10, 1)], 2 / 3),
            # it is made, but not yet pinned
            ([(0, 0, 3, 1, 3, 0), (1, 0, 3, 5, 6, 0), (0, 3, 5, 9, 9, 1), (1, 3, 9, 10, 10, 1)], 2 / 3),
        ],
    )
    def test_is_that_of_the_next_batch_in_order(self, times, ready):
        record = observed([row[:5] for row in times])
        [loader] = record.loaders
        loader.epochs[0].batches = [
            batch._replace(ready=row[5]) for batch, row in zip(loader.epochs[0].batches, times, strict=True)
        ]
        assert find_accounts(record).ready == pytest.approx(ready)


class TestWorkersTimes:
    @pytest.mark.parametrize("n_bytes", [20, 60])
    def test_are_read_epoch_by_epoch_while_they_are_written(self, tmp_path, n_bytes):
        """Three epochs of two workers, and part of a batch at the end of each look."""
        rows = {worker: [BatchTiming(n, n + 1, 0.5, 0.1, n // 4) for n in range(12)] for worker in (0, 1)}
        data = {
            worker: b"".join(struct.pack("<6dq16x", *row, 16) for row in of_worker)
            for worker, of_worker in rows.items()
        }
        reader = TimesReader()
        for epoch, size in enumerate([4 * 72 + n_bytes, 12 * 72, 12 * 72]):  # the second and the third at one look
            for worker, written in data.items():
                (tmp_path / f"{worker}.times").write_bytes(written[:size])
            expected = {worker: of_worker[4 * epoch : 4 * epoch + 4] for worker, of_worker in rows.items()}
            assert reader.read(str(tmp_path), epoch) == expected
        assert reader.read("", 0) == {}


class Shards(IterableDataset):
    """Gives its numbers to so many workers."""

    def __init__(self, n_shards):
        self.n_shards = n_shards

    def __iter__(self):
        return (torch.full((4,), float(number)) for number in range(40 if get_worker_info().id < self.n_shards else 0))


class TestWorkers:
    @pytest.mark.parametrize(
        ("data", "said"),
        [
            (Shards(1), "Workers 1 and 2 of 3 made no batch: num_workers=1 does the same, or give the data set more"),
            (Shards(3), ""),
            (TensorDataset(torch.zeros(4, 4)), "Worker 2 of 3 made no batch: num_workers=2 does the same, as an epoch"),
        ],
    )
    def test_that_made_no_batch_are_named_with_the_remedy(self, data, said):
        watched = watched_while(DataLoader(data, 2, num_workers=3))
        told = [note for note in watched.report().notes if "made no batch" in note]
        assert [note[: len(said)] for note in told] == [said] * bool(said)
