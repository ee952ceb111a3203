"""`lk.compare`: interleaved rounds that go on until the answer is precise, by a clock that only work advances."""

import re
import threading
import time
import types

import numpy as np
import pandas as pd
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import labkit as lk
from labkit.errors import VariantError
from labkit.measure import compare as rounds_of, frames
from labkit.measure.compare import Stopping
from labkit.measure.frames import COLUMNS
from labkit.measure.intervals import side_of_one, speedup_interval
from labkit.measure.recorder import set_recorder
from labkit.measure.statistics import quiet_summary
from labkit.measure.steady import page_cache_state
from labkit.measure.usage import PeakMemory
from labkit.util.machine import env_id
from tests.loaders import Numbers, eventually, loader_of, new_threads
from tests.timing import Clock

pytestmark = pytest.mark.usefixtures("unsampled")


def measure(factory, **options) -> pd.Series:
    """The only run of a variant."""
    return lk.compare({"a": factory}, baseline="a", **{"rounds": 1, "warmups": 0, **options}).iloc[0]


class TestRounds:
    def test_tell_a_known_ratio_from_equal_variants(self):
        clock, rng = Clock(), np.random.default_rng(0)

        def noisy(seconds):
            return lambda: clock.batches(*(seconds * rng.lognormal(0, 0.01, 2)))

        variants = {"slow": noisy(2.0), "fast": noisy(1.0), "twin": noisy(2.0)}
        summary = lk.summarize(lk.compare(variants, baseline="slow", rounds=9, clock=clock))
        fast = summary.loc["fast"]
        assert fast.ci_low < 2.0 < fast.ci_high
        assert fast.ci_high / fast.ci_low < 1.05
        assert dict(summary.verdict) == {"slow": "baseline", "fast": "faster", "twin": "inconclusive"}

    def test_run_each_variant_once_in_an_order_that_the_next_mirrors(self):
        calls = []
        variants = {name: (lambda name=name: calls.append(name) or [1]) for name in "abcd"}
        runs, again, other = (lk.compare(variants, baseline="a", rounds=6, warmups=2, seed=seed) for seed in (3, 3, 2))
        assert list(runs.variant) == list("abcd") * 8
        assert list(runs.sort_values(["round", "order"]).variant) == calls[:32]
        orders = [tuple(calls[start : start + 4]) for start in range(0, 32, 4)]
        assert all(sorted(order) == list("abcd") for order in orders)
        assert orders[1::2] == [order[::-1] for order in orders[::2]]
        assert len(set(orders)) > 3
        assert list(runs.is_warmup) == [True] * 8 + [False] * 24
        assert (set(runs.baseline), set(runs.seed)) == ({"a"}, {3})
        assert list(again.order) == list(runs.order) != list(other.order)

    @pytest.mark.parametrize(("scale", "rounds"), [("ci", 2), ("laptop", 4), ("gpu", 5)])
    def test_are_those_of_the_scale_after_one_to_warm_up(self, monkeypatch, scale, rounds):
        monkeypatch.setenv("LABKIT_SCALE", scale)
        runs = lk.compare({"a": lambda: [1]}, baseline="a")
        assert runs.is_warmup.tolist() == [True] + [False] * rounds
        assert (runs.seed[0], runs.experiment[0], runs["round"].tolist()) == (0, "", list(range(rounds + 1)))

    def test_have_torch_s_threads_stated_and_the_same_for_all(self):
        n_threads, seen = torch.get_num_threads(), []
        greedy = lambda: seen.append(torch.get_num_threads()) or torch.set_num_threads(n_threads + 3) or [1]  # noqa: E731
        runs = lk.compare({"a": greedy, "b": greedy}, baseline="a", rounds=2)
        assert set(seen) == set(runs.torch_num_threads) == {torch.get_num_threads()} == {n_threads}

    def test_wait_for_the_gpu(self, cuda):
        def kernels():
            for _ in range(10):
                torch.cuda._sleep(40_000_000)  # about 20 ms
                yield 1

        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        list(kernels())
        torch.cuda.synchronize()
        start.record()
        list(kernels())
        end.record()
        torch.cuda.synchronize()
        runs = lk.compare({"kernels": kernels}, baseline="kernels", rounds=3, clock=time.perf_counter)
        assert (runs.first_batch_s + runs.steady_s).median() > 0.8 * start.elapsed_time(end) / 1e3


class TestTheFrame:
    def test_fills_and_explains_every_column_and_takes_factors(self):
        """Of a new column, this names what was forgotten: its row in `COLUMNS`, its line above it, or its value."""
        loader = DataLoader(TensorDataset(torch.zeros(8, 3, 4, 4)), batch_size=4)
        variants, factors = {"a": lambda: loader, "b": lambda: loader}, {"storage": {"b": "tape"}, "flavour": "x"}
        runs = lk.compare(variants, baseline="a", experiment="e", rounds=1, factors=factors)
        assert list(runs)[: len(COLUMNS)] == list(COLUMNS)
        assert [name for name in COLUMNS if runs[name].isna().all()] == ["peak_mem_mb"]  # by a fixture
        own = ["experiment", "flavour", "batch_size", "num_workers", "env_id"]
        assert runs[own].drop_duplicates().to_numpy().tolist() == [["e", "x", 4, 0, env_id()]]
        assert runs.storage.fillna("").tolist() == ["", "tape"] * 2
        assert set(runs.pop("flavour")) == {"x"}
        assert set(runs) - {*COLUMNS} == {"scale", "rung"}
        explained = re.findall(r"\w+", "".join(re.findall(r"^[a-z_, ]+:", frames.__doc__, re.MULTILINE)))
        assert set(runs) == set(explained)

    def test_takes_over_what_an_iterable_tells_of_its_own_costs(self):
        class Told(list):
            batch_size, num_workers, cpu_s, peak_mem_mb, page_cache = 8, 3, 1.5, 77.0, "cold"

        run = measure(lambda: Told([1]))
        told = ["batch_size", "num_workers", "cpu_s", "peak_mem_mb", "page_cache"]
        assert run[told].tolist() == [8, 3, 1.5, 77.0, "cold"]

    def test_is_recorded_where_the_experiment_has_a_name(self):
        frames = []
        set_recorder(types.SimpleNamespace(record_frame=frames.append))
        named, _ = [lk.compare({"a": lambda: [1]}, baseline="a", rounds=1, experiment=name) for name in ("kept", "")]
        [recorded] = frames
        assert recorded is named

    def test_gives_verdicts_if_they_are_asked_for(self):
        variants = {name: lambda: [1] for name in "ab"}
        for verdicts in (True, False):
            found = quiet_summary(lk.compare(variants, baseline="a", rounds=3, verdicts=verdicts)).verdict
            assert (found["a"], bool(found["b"])) == ("baseline", verdicts)


def torchs_loader_of(dataset, num_workers):
    return DataLoader(dataset, 4, num_workers=num_workers)


def broken():
    yield 1
    raise OSError("disk on fire")


class TestMistakes:
    @pytest.mark.parametrize(
        ("factory", "said", "cause"),
        [
            (lambda: [[]], "raised WrongTypeError: .* pass count= to lk.compare, or .*", TypeError),
            (broken, "raised OSError: disk on fire", OSError),
            (list, "yielded no batch", type(None)),
            (lambda: [torch.zeros(0, 3, 4, 4)] * 3, "gave batches, and no image in any of them, .*", type(None)),
        ],
    )
    def test_of_a_variant_are_told_by_its_name(self, factory, said, cause):
        with pytest.raises(VariantError, match=f"^variant 'bad' {said}$") as caught:
            lk.compare({"good": lambda: [1], "bad": factory}, baseline="good")
        assert isinstance(caught.value.__cause__, cause)
        assert caught.value.__suppress_context__

    @pytest.mark.parametrize(("make", "num_workers"), [(loader_of, 2), (torchs_loader_of, 2)])
    def test_of_a_loader_keep_type_and_text_and_leave_nothing_behind(self, monkeypatch, make, num_workers):
        def fail(index):
            if index == 5 and trouble:
                raise LookupError(*trouble)

        monkeypatch.setattr(rounds_of, "PeakMemory", PeakMemory)  # whose process has to end, too
        trouble, threads = ["no room left"], threading.enumerate()
        processes = {*psutil.Process().children(recursive=True)}
        loader = make(Numbers(action=fail), num_workers)
        told = ".*while loading key-5$" if make is loader_of else ""
        with pytest.raises(VariantError, match=r"(?s)^variant 'a' raised LookupError: .*no room left" + told) as caught:
            measure(lambda: loader)
        assert type(caught.value.__cause__) is LookupError  # whose traceback holds no workers
        assert eventually(lambda: new_threads(threads) == [])  # that of torch's queue ends by itself
        assert eventually(lambda: {*psutil.Process().children(recursive=True)} <= processes)
        trouble.clear()
        assert measure(lambda: lk.whole_pass(loader)).n_images == 12

    @pytest.mark.parametrize(
        ("variants", "options", "message"),
        [
            ({}, {}, "no variants"),
            ({"a": list}, {"baseline": "b"}, "baseline must be one of a, got 'b'"),
            ({"a": list}, {"rounds": 0}, "rounds must be an integer >= 1, got 0"),
            ({"a": list}, {"precision": 0}, "precision must be > 0, as 0.05 for 5 %, got 0"),
            ({"a": list}, {"warmups": -1}, "warmups must be an integer >= 0, got -1"),
            ({"a": lambda: [1]}, {"verdicts": ["a"]}, "verdicts must be True or False, got "),
            ({"a": list}, {"storage": 1}, "unexpected keyword argument 'storage'"),  # it belongs into factors
        ],
    )
    def test_of_the_caller_are_refused_before_anything_runs(self, variants, options, message):
        with pytest.raises((ValueError, TypeError), match=message):
            lk.compare(variants, **{"baseline": "a", **options})

    def test_such_as_different_work_are_said_to_the_caller(self, recwarn):
        left = iter(range(3, 0, -1))
        with pytest.warns(UserWarning, match=r"the passes of 'b' .* same number of images: \[3, 2, 1\]") as caught:
            lk.compare({"a": lambda: [1] * 1, "b": lambda: [1] * next(left)}, baseline="a", rounds=2)
        assert caught[0].filename == __file__
        short = DataLoader(TensorDataset(torch.zeros(8, 3, 4, 4)), batch_size=4)
        runs = lk.compare({"a": lambda: short, "b": lambda: short}, baseline="a", rounds=2)
        assert not recwarn.list
        assert runs.is_steady.all()
        with pytest.warns(UserWarning, match=r"same number of images: \{'a': 8, 'b': 40\}"):
            lk.compare({"a": lambda: short, "b": lambda: [4] * 10}, baseline="a", rounds=1)


@pytest.mark.parametrize(
    ("before", "after", "state"), [(None, 5, "unknown"), (5, None, "unknown"), (5, 5, "warm"), (5, 6, "unknown")]
)
def test_the_page_cache_is_warm_where_nothing_was_read_from_storage(before, after, state):
    assert page_cache_state(before, after) == state


class Rounds:
    """Rounds of two or more variants with given ratios to "a"; each run takes a second."""

    def __init__(self, noise, **ratios):
        self.rng, self.noise, self.now = np.random.default_rng(0), noise, 0.0
        self.ratios = {"a": 1.0, **ratios}

    def run(self, *, min_rounds=5, precision=0.05, budget_s=1e9, run_s=1.0, rng=None):
        """Labels of each round, the ratios of the last variant to "a", and how often they were looked at."""
        stopping = Stopping(min_rounds, precision, budget_s, lambda: self.now)
        stopping.begin()
        rows, ran, labels = [], [], list(self.ratios)
        while labels:
            ran.append(labels)
            for label in labels:
                self.now += run_s
                rate = self.ratios[label] * np.exp(self.noise(rng or self.rng))
                rows.append({"variant": label, "round": len(ran), "images_per_s": rate})
            labels = stopping.next_round(rows, labels, "a", len(ran))
        rates = pd.DataFrame(rows).pivot(index="round", columns="variant", values="images_per_s")
        return ran, (rates[list(self.ratios)[-1]] / rates["a"]).to_numpy(), stopping.n_looks


def normal(scale):
    return lambda rng: rng.normal(0, scale)


def bursts(rng):
    return rng.normal(0, 0.03) - (rng.random() < 0.12) * rng.exponential(0.35)


class TestTheEnd:
    @pytest.mark.parametrize(
        ("noise", "ratio", "n_rounds"),
        [
            (0.01, 1.1, {5}),  # a quiet machine is believed at the first look
            (0.1, 1.1, {20}),  # and a noisy one at the last
            (0.06, 10.0, {5}),  # a tenfold difference needs no narrow interval
            (0.06, 1.1, set(range(6, 21))),
        ],
    )
    def test_comes_when_the_interval_is_narrow_enough(self, noise, ratio, n_rounds):
        assert len(Rounds(normal(noise), b=ratio).run()[0]) in n_rounds

    @pytest.mark.parametrize("precision", [0.02, 0.2])
    def test_is_what_the_precision_says(self, precision):
        ran, ratios, n_looks = Rounds(normal(0.1), b=1.0).run(precision=precision)
        low, high = speedup_interval(ratios, n_looks=n_looks)
        assert (np.log(high / low) / 2 <= np.log1p(precision)) == (len(ran) < 20)

    def test_comes_earlier_for_a_variant_that_is_known_well_enough(self):
        ran, _, _ = Rounds(normal(0.04), b=20.0, c=1.02).run()
        assert ran[:5] == [["a", "b", "c"]] * 5
        assert ran[5:] == [["a", "c"]] * (len(ran) - 5)
        assert len(ran) > 5

    @pytest.mark.parametrize(
        ("budget_s", "run_s", "n_rounds", "n_looks"),
        [(0, 0.0, 5, 1), (12, 1.0, 6, 1), (18, 1.0, 9, 3), (1e9, 1.0, 20, 3)],
    )
    def test_comes_before_the_time_is_spent_whatever_the_rounds_show(self, budget_s, run_s, n_rounds, n_looks):
        ran, _, looks = Rounds(normal(0.1), b=1.0).run(budget_s=budget_s, run_s=run_s)
        assert (len(ran), looks) == (n_rounds, n_looks)

    @pytest.mark.parametrize(
        ("noise", "options", "n_rounds", "n_looks"),
        [
            (0.001, {"budget_s": 100}, 2, 3),  # `ci` asks for two rounds at least
            (0.2, {"budget_s": 100}, 8, 3),
            (0.2, {}, 2, 1),
            (0.2, {"rounds": 4, "budget_s": 1}, 4, 1),
        ],
    )
    def test_of_compare_comes_by_its_own_clock(self, noise, options, n_rounds, n_looks):
        clock, rng = Clock(), np.random.default_rng(0)
        variants = {
            label: lambda seconds=seconds: clock.batches(seconds * np.exp(rng.normal(0, noise)))
            for label, seconds in {"a": 1.0, "b": 0.5}.items()
        }
        frame = lk.compare(variants, baseline="a", clock=clock, **options)
        assert (int((~frame["is_warmup"]).sum() / 2), frame["n_looks"].iloc[0]) == (n_rounds, n_looks)

    @pytest.mark.parametrize(
        ("rung", "thorough", "n_rounds"), [(True, "", 4), (False, "", 3), (True, "1", 16), (False, "1", 16)]
    )
    def test_of_side_comparisons_comes_early_unless_the_tour_is_thorough(self, rung, thorough, n_rounds, monkeypatch):
        monkeypatch.setenv("LABKIT_SCALE", "laptop")
        monkeypatch.setenv("LABKIT_THOROUGH", thorough)
        clock, rng = Clock(), np.random.default_rng(0)
        variants = {label: lambda: clock.batches(0.36 * np.exp(rng.normal(0, 0.2))) for label in "ab"}
        frame = lk.compare(variants, baseline="a", clock=clock, rung=rung)
        assert int((~frame["is_warmup"]).sum() / 2) == n_rounds

    @pytest.mark.exhaustive
    @pytest.mark.parametrize(("noise", "ratio"), [(bursts, 1.0), (bursts, 2.0)])
    def test_at_a_look_that_pleases_leaves_the_intervals_valid(self, noise, ratio):
        """Over 400 comparisons, to within two standard errors."""
        rng, covered, verdicts = np.random.default_rng(7), [], []
        for _ in range(400):
            _, ratios, n_looks = Rounds(noise, b=ratio).run(rng=rng)
            low, high = speedup_interval(ratios, n_looks=n_looks)
            covered.append(low <= ratio <= high)
            verdicts.append(side_of_one((low, high)))
        assert np.mean(covered) >= 0.95 - 2 * np.sqrt(0.95 * 0.05 / 400)
        if ratio == 1.0:
            assert np.mean(np.array(verdicts) != "inconclusive") <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / 400)
        else:
            assert verdicts.count("faster") >= 0.9 * 400
