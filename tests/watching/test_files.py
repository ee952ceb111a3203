"""Which samples hold a training up: slow ones, and those at the head of the line, by times that are known."""

import os
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

import labkit as lk
from labkit.watching.accounts import find_accounts
from labkit.watching.findings import slow_samples
from labkit.watching.loaders import Batch, Epoch, LoaderTraits, SeenLoader, names_of
from labkit.watching.record import Record
from labkit.watching.worker import BatchTiming
from tests.stalling import Clock
from tests.watching.trained import train


def observed(times, *, num_workers=2, prefetch_factor=2):
    """An observation of batches, by the worker that made each, when it was begun and ready, asked for and received."""
    epoch = Epoch(0.0, 1, ended_s=100.0)
    epoch.batches = [
        Batch(asked, received, worker, None, number, 0.0, 0.0, 0.0, "training")
        for number, (worker, _, _, asked, received) in enumerate(times)
    ]
    traits = LoaderTraits(num_workers=num_workers, prefetch_factor=prefetch_factor)
    record = Record()
    record.loaders = [SeenLoader(0, "DataLoader", traits, [epoch])]
    made = {worker: [BatchTiming(b, e, 0.0, 0.0, 0.0) for w, b, e, *_ in times if w == worker] for worker in range(2)}
    record.times = lambda loader: {0: made}
    return record


class TestTheHeadOfTheLine:
    @pytest.mark.parametrize(
        ("times", "in_line_s"),
        [
            # worker, begun, ready, asked for, received: worker 1's batch is ready at 3, worker 0's only at 8
            ([(0, 0, 8, 1, 8), (1, 0, 3, 9, 9), (0, 8, 10, 10, 10), (1, 3, 6, 11, 11)], 5.0),
            # the later one is ready before the first is asked for
            ([(0, 0, 8, 6, 8), (1, 0, 3, 9, 9), (0, 8, 10, 10, 10), (1, 3, 6, 11, 11)], 2.0),
            # both take equally long
            ([(0, 0, 8, 1, 8), (1, 0, 8, 9, 9), (0, 8, 16, 10, 16), (1, 8, 16, 17, 17)], 0.0),
            # the slow one is ready before it is asked for
            ([(0, 0, 8, 20, 20), (1, 0, 3, 21, 21), (0, 8, 10, 22, 22), (1, 3, 6, 23, 23)], 0.0),
        ],
    )
    def test_is_waited_for_while_a_later_batch_is_ready(self, times, in_line_s):
        assert find_accounts(observed(times)).in_line_s == pytest.approx(in_line_s / 4)


class Named(Dataset):
    def __init__(self, n_samples=8):
        self.names = [f"{number}.jpg" for number in range(n_samples)]

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        return torch.zeros(4)


class SlowFifth(Named):
    def __getitem__(self, index):
        time.sleep(0.4 * (index == 5))
        return torch.zeros(4)


class Spends(Named):
    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def __getitem__(self, index):
        self.clock.sleep(index)
        return torch.zeros(4)

    def collate(self, samples):
        self.clock.sleep(100)
        return torch.stack(samples)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.zeros(8, 4))


class TestSamples:
    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_are_timed_one_by_one_in_every_loader_that_makes_them_so(self, num_workers):
        batches = [[5, 1], [3, 0], [7, 7], [2, 4]]
        config = lk.LoaderConfig(2, num_workers, start_method="fork" if num_workers else None)
        loaders = {
            "by numbers": (DataLoader(Named(), batch_sampler=batches, num_workers=num_workers), 8),
            "a subset": (DataLoader(Subset(Named(), [4, 5, 6]), 2, num_workers=num_workers), 3),
            "make_loader": (lk.make_loader(Named(), config, sampler=[5, 1, 3, 0], collate_fn=torch.stack), 4),
            "a stream": (DataLoader(Stream(), 2, num_workers=num_workers), None),
        }
        for kind, (loader, n_samples) in loaders.items():
            with lk.watch() as watched:
                list(loader)
                [seen] = watched.record.loaders
                found = watched.record.samples(seen)
            if n_samples is None:  # they have no numbers
                assert slow_samples(found, seen.name_of)[1] == ""
                continue
            assert len(found) == n_samples, kind
            assert all(seconds >= 0 for _, seconds in found)
            if kind == "by numbers":
                assert sorted(found)[-1][0] == 7
                assert sorted(int(index) for index, _ in found) == [0, 1, 2, 3, 4, 5, 7, 7]
                assert seen.name_of(7.0) == "7.jpg"
            if kind == "a subset":
                assert seen.name_of(1) == "5.jpg"

    def test_have_the_names_of_a_table(self):
        names = pd.DataFrame({"label": ["a", "b"] * 4, "image": [f"{number}.png" for number in range(8)]})
        for table in (names, names.iloc[::-1].set_index("label"), names["image"]):
            data = Named()
            data.names = table
            first = "7.png" if table.index.name else "0.png"
            assert names_of(data)(0) == first
            assert names_of(data)(8) == "sample 8"

    def test_have_numbers_where_their_names_would_have_to_be_read(self):
        class OfAFile(list):
            def __getitem__(self, index):
                read.append(index)
                return super().__getitem__(index)

        read, data = [], Named()
        data.names = OfAFile(data.names)
        assert names_of(data)(1) == "sample 1"
        assert read == []

    @pytest.mark.parametrize("num_workers", [0, 1])
    @pytest.mark.parametrize("seeded", [False, True])
    def test_have_the_seconds_that_each_took(self, monkeypatch, num_workers, seeded):
        """By a clock that moves as many seconds as a sample's number, and 100 in the collate function."""
        clock = Clock(monkeypatch)
        data = Spends(clock)
        config = lk.LoaderConfig(3, num_workers, start_method="fork" if num_workers else None)
        loader = lk.make_loader(data, config, sampler=range(8), collate_fn=data.collate) if seeded else DataLoader(
            data, 3, num_workers=num_workers, collate_fn=data.collate
        )  # fmt: skip
        with lk.watch() as watched:
            list(loader)
            found = watched.record.samples(watched.record.loaders[0])
        assert [index for index, _ in found] == [*range(8)]
        assert [seconds for _, seconds in found] == pytest.approx([*range(8)], abs=0.01)

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_that_a_process_made_first_are_none_of_the_settled(self, num_workers):
        with lk.watch() as watched:
            list(DataLoader(Named(), 2, num_workers=num_workers))
            [seen] = watched.record.loaders
            settled = sorted(index for index, _ in watched.record.samples(seen, settled=True))
        assert settled == ([1, 3, 4, 5, 6, 7] if num_workers else [*range(1, 8)])

    def test_that_a_killed_worker_noted_are_known_but_for_its_last_batch(self):
        with lk.watch() as watched:
            list(DataLoader(Named(), 2, num_workers=1))
            [seen] = watched.record.loaders
            [path] = Path(seen.folder).glob("*.times")
            data = path.read_bytes()
            whole = watched.record.times(seen)[0][0], watched.record.samples(seen)
            assert (len(whole[0]), len(whole[1])) == (4, 8)
            for harmed in (data + b"\xff" * 99, data + bytes(48) + (-(10**6)).to_bytes(8, "little", signed=True)):
                path.write_bytes(harmed)
                assert watched.record.samples(seen) == whole[1]
            for size in range(len(data)):
                path.write_bytes(data[:size])
                times, samples = watched.record.times(seen)[0][0], watched.record.samples(seen)
                n_batches, n_samples = len(times), len(samples)
                assert (times, samples) == (whole[0][:n_batches], whole[1][:n_samples])
                assert n_batches - 1 <= n_samples / 2 <= n_batches <= 4 * size / len(data) + 1
                assert n_samples >= 2 * int(4 * size / len(data))

    def test_do_not_take_what_their_process_stood_in_line_for_a_core(self, monkeypatch):
        now_s, queued_s = [100.0], [7.0]

        class Interrupted(Named):
            def __getitem__(self, index):
                in_line_s = 50.0 * (index in (1, 7))
                now_s[0] += 1.0 + index + in_line_s
                queued_s[0] += in_line_s
                return super().__getitem__(index)

        monkeypatch.setattr("labkit.watching.worker.run_queue_s", lambda: queued_s[0])
        monkeypatch.setattr("time.perf_counter", lambda: now_s[0])
        with lk.watch() as watched:
            list(DataLoader(Interrupted(), 4))
            found = watched.record.samples(watched.record.loaders[0])
        assert found == [(index, 1.0 + index) for index in range(8)]

    @pytest.mark.parametrize("wrapped", [False, True])
    def test_of_a_data_set_that_takes_all_indices_are_not_timed(self, wrapped):
        class Batches(Named):
            def __getitems__(self, indices):
                assert type(indices) is list
                return [self[index] for index in indices]

        with lk.watch() as watched:
            list(DataLoader(Subset(Batches(), range(8)) if wrapped else Batches(), 2))
            assert watched.record.samples(watched.record.loaders[0]) == []

    def test_that_are_slow_are_told_with_their_file_and_its_share(self, tmp_path):
        paths = [str(tmp_path / f"{number}.jpg") for number in range(100)]
        pixels = np.random.default_rng(0).integers(0, 255, (30, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(paths[7], progressive=True)
        Image.fromarray(pixels).save(paths[3], "PNG")
        slow_s = {7: 30.5, 3: 15.5}
        seconds = [(number, slow_s.get(number, 1.0)) for number in range(100)] * 2
        samples, slow = slow_samples(seconds, lambda index: paths[int(index)])
        size = f"{os.path.getsize(paths[7]) / 1e6:.2g} MB"
        # 7 takes 61 of 288 seconds and 3 takes 31; the others 2 each.
        assert slow.startswith("2 of 100 samples take 32% of the time in which samples are made: ")
        assert f"7.jpg 3.05e+04 ms (progressive JPEG, 40 x 30, {size}), " in slow
        assert "(PNG, 40 x 30, " in slow
        assert slow.endswith("; the median sample takes 1e+03 ms.")
        rows = pd.DataFrame(samples)
        assert len(rows) == 20
        assert list(rows["sample"][:2]) == [paths[7], paths[3]]
        assert rows["seconds"][0] == pytest.approx(61 / 2)
        assert rows["share"][0] == pytest.approx(61 / 288)
        assert rows["bytes"][1] == os.path.getsize(paths[3])
        assert rows["format"][2:].isna().all(), "there are no such files"

    def test_that_are_pipes_are_not_opened(self, tmp_path):
        """The report of a training that hung in one would hang, too."""
        os.mkfifo(tmp_path / "0.jpg")
        [row] = slow_samples([(0, 1.0)], lambda index: str(tmp_path / "0.jpg"))[0]
        assert list(row) == [
            "sample", "seconds", "share",
        ]  # fmt: skip

    def test_that_all_take_about_as_long_are_not_told(self):
        assert slow_samples([(number, 1.0 + number / 100) for number in range(100)], str)[1] == ""
        assert slow_samples([], str) == ([], "")
        # nor those of microseconds
        assert slow_samples([(number, 1e-5 * (1 + 99 * (number == 7))) for number in range(100)], str)[1] == ""

    def test_that_were_slow_once_alone_are_not_slow(self):
        """A worker's first sample loads libraries."""
        seconds = [(number, 1.0) for number in range(100)] * 2 + [(7.0, 59.0)]
        samples, slow = slow_samples(seconds, str)
        assert (slow, samples[0]["seconds"]) == ("", 1.0)

    def test_are_in_the_report(self):
        with lk.watch() as watched:
            train(DataLoader(SlowFifth(80), 2))
        report = watched.report()
        assert report.slow.startswith("1 of 79 samples takes "), report.slow
        assert "of the time in which samples are made: 5.jpg " in report.slow
        assert report.slow in report.details
        assert report.to_dict()["samples"][0]["sample"] == "5.jpg"
        assert "5.jpg" in report._repr_html_()
