"""Loaders that are slower every time drop out, and the race ends when the winner is certain."""

import time

import pandas as pd
import pytest

import labkit as lk
from labkit.tuning import race

pytestmark = pytest.mark.alone


def _runs(**rates):
    """A frame of made-up rates, one a round."""
    rows = [
        {"experiment": "", "variant": label.replace("_", " "), "round": number, "is_warmup": False,
         "images_per_s": rate, "steady_s": 1 / rate}
        for label, each in rates.items() for number, rate in enumerate(each)
    ]  # fmt: skip
    return pd.DataFrame(rows).assign(
        baseline="default", env_id="here", order=0, n_images=1, cpu_s=0.0, peak_mem_mb=0.0, startup_s=0.0, storage=""
    )


class TestRace:
    @staticmethod
    def run(try_default_first=True, **seconds):
        def naps(each):
            return lambda: (time.sleep(each) or 1 for _ in range(4))

        variants = {label.replace("_", " "): naps(each) for label, each in seconds.items()}
        deadline = time.perf_counter() + 4
        return race.race(
            variants, default="default", deadline=deadline, progress=False, try_default_first=try_default_first
        )

    def test_the_winner_is_found(self):
        runs = self.run(default=0.03, fast=0.01)
        assert lk.summarize(runs, "default").loc["fast", "verdict"] == "faster"
        assert not runs.duplicated(["variant", "round"]).any()

    def test_nobody_runs_where_the_default_keeps_up(self):
        assert set(self.run(default=0.02, fast=0.01, step_alone=0.02)["variant"]) == {"default", "step alone"}

    def test_all_run_at_once_where_it_cannot(self):
        runs = self.run(default=0.02, fast=0.01, step_alone=0.02, try_default_first=False)
        assert set(runs.loc[runs["round"] == 0, "variant"]) == {"default", "fast", "step alone"}

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
