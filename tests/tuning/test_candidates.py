"""Which loaders are worth measuring, by a model of what each would bring."""

import pytest

import labkit as lk
from labkit.watching import tune as field
from labkit.watching.advice import expected_s
from labkit.watching.timings import Making
from labkit.watching.tune import DEFAULT, _CostsAlone, worth_measuring

pytestmark = pytest.mark.alone


@pytest.fixture
def two_cores(monkeypatch):
    for name in ("usable_cores", "cores_per_rank"):
        monkeypatch.setattr(field, name, lambda: 2)


class TestModel:
    @pytest.mark.parametrize(
        ("num_workers", "making", "step_s", "step_cpu_s", "seconds"),
        [
            (0, Making(0.3, 0.0), 0.1, 0.1, 0.4),  # one process makes, then trains
            (2, Making(0.3, 0.0), 0.0, 0.0, 0.15),  # workers share the making
            (8, Making(0.3, 0.0), 0.0, 0.0, 0.15),  # but not more than the cores
            (8, Making(0.4, 1.0), 0.0, 0.0, 0.05),  # waiting needs no core
            (2, Making(0.1, 0.0), 0.1, 0.2, 0.15),  # a step on the CPU takes cores from the workers
            (64, Making(0.1, 1.0), 0.5, 0.0, 0.5),  # nothing is faster than the step
        ],
    )
    def test_what_is_expected_on_two_cores(self, num_workers, making, step_s, step_cpu_s, seconds):
        assert expected_s(num_workers, making, step_s, step_cpu_s, cores=2) == pytest.approx(seconds)

    @pytest.mark.parametrize(("step_s", "may"), [(0.1, True), (0.07, False)])
    def test_whether_the_default_may_keep_up(self, step_s, may):
        assert _CostsAlone(Making(0.1, 1.0), step_s, 0.0, []).may_keep_up(lk.LoaderConfig(num_workers=1)) == may

    @pytest.mark.usefixtures("two_cores")
    def test_what_is_worth_measuring(self):
        assert worth_measuring(Making(0.3, 0.0), 0.0, 0.0) == [2]
        assert worth_measuring(Making(0.01, 0.0), 1.0, 0.0) == [1, 2, 0]  # all alike: the fewest that keep up first
        assert worth_measuring(Making(0.8, 1.0), 0.0, 0.0) == [16]

    @pytest.mark.usefixtures("two_cores")
    def test_the_default_is_always_among_them_and_nobody_twice(self):
        found = field.candidates(lk.LoaderConfig(num_workers=2), Making(0.3, 0.0), 0, 0, decoder=None, threads=False)
        assert list(found) == [DEFAULT, "2 workers, 4 ahead"]
        assert found[DEFAULT].config == lk.LoaderConfig(num_workers=2)

    @pytest.mark.usefixtures("two_cores")
    def test_no_setting_of_workers_goes_where_there_are_none(self, recwarn):
        config = lk.LoaderConfig(prefetch_factor=4, persistent_workers=True, start_method="spawn")
        field.with_workers(config, 0).resolved()
        assert not recwarn.list
