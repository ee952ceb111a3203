"""Loaders that are slower every time drop out, and the race ends when the winner is certain."""

import time

import pandas as pd
import pytest

import labkit as lk
from labkit.watching import tune as race


def _runs(**rates):
    """A frame of made-up rates, one a round."""
    rows = [
        {"experiment": "", "variant": label.replace("_", " "), "round": number, "is_warmup": False,
         "images_per_s": rate, "steady_s": 1 / rate, "first_batch_s": 0.0, "n_steady_images": 1}
        for label, each in rates.items() for number, rate in enumerate(each)
    ]  # fmt: skip
    return pd.DataFrame(rows).assign(
        baseline="default", env_id="here", order=0, n_images=1, cpu_s=0.0, peak_mem_mb=0.0, startup_s=0.0, storage=""
    )


class TestRace:
    @pytest.fixture
    def run(self, monkeypatch):
        """Races of given rates, which `compare` would have measured."""

        def compare(rates, **options):
            return _runs(**{label: [0.99 * rate, rate, 1.01 * rate] for label, rate in rates.items()})

        monkeypatch.setattr(race, "compare", compare)
        deadline = time.perf_counter() + 60
        return lambda rates, **options: race.race(rates, default="default", deadline=deadline, **options)

    def test_the_winner_is_found(self, run):
        runs = run({"default": 30, "fast": 100})
        assert lk.summarize(runs, "default").loc["fast", "verdict"] == "faster"
        assert not runs.duplicated(["variant", "round"]).any()

    @pytest.mark.parametrize(
        ("first", "ran"), [(True, {"default", "step alone"}), (False, {"default", "fast", "step alone"})]
    )
    def test_nobody_runs_where_the_default_keeps_up_and_is_tried_first(self, run, first, ran):
        runs = run({"default": 50, "fast": 100, "step alone": 50}, try_default_first=first)
        assert set(runs.loc[runs["round"] == 0, "variant"]) == set(runs["variant"]) == ran

    def test_a_default_that_does_not_keep_up_meets_the_others(self, run):
        runs = run({"default": 50, "fast": 100, "step alone": 100})
        assert runs.groupby("variant")["round"].apply(list).to_dict() == {
            "default": [0, 1, 2, 3, 4, 5], "step alone": [0, 1, 2, 3, 4, 5], "fast": [3, 4, 5],
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("rates", "kept", "decided"),
        [
            ({"default": [10, 10, 10], "b": [20, 21, 20]}, {"default", "b"}, True),
            ({"default": [10, 10, 10], "b": [5, 6, 5]}, {"default"}, True),
            ({"default": [10, 10, 10], "b": [20, 21, 20], "c": [20, 20, 21]}, {"default", "b", "c"}, False),
            ({"default": [10, 10, 10], "b": [20, 21, 20], "c": [15, 15, 15]}, {"default", "b"}, True),
            ({"default": [10, 10, 10], "b": [20, 21, 20], "c": [15, 15, 20]}, {"default", "b", "c"}, False),
            ({"default": [10, 11, 10], "b": [10, 10, 11]}, {"default", "b"}, False),
            # As fast as the step: nobody can be faster, so that the rest need not go on.
            (
                {"default": [10, 10, 10], "b": [20, 21, 20], "c": [21, 21, 21], "step_alone": [21, 21, 21]},
                {"default", "c", "step alone"}, True,
            ),
        ],
    )  # fmt: skip
    def test_who_goes_on(self, rates, kept, decided):
        runs = _runs(**rates)
        found = race.next_heat(runs, list(runs["variant"].unique()), "default")
        assert (set(found[0]), found[1]) == (kept, decided)
