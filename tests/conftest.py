"""Shared by all unit tests."""

import os

import matplotlib
import pytest

matplotlib.use("Agg")
os.environ.setdefault("TQDM_DISABLE", "1")  # what tests start says nothing on stderr but errors


@pytest.fixture(autouse=True)
def _no_open_figures():
    """A figure left open would be drawn into by the next test."""
    yield
    from matplotlib import pyplot

    pyplot.close("all")


@pytest.fixture(autouse=True)
def _same_environment():
    """The command line sets variables for the kernels that it starts: they end with the test."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def frame_of():
    """Builds a frame of runs from label -> images per second of each round, as `compare` would have measured them."""
    from labkit.measure.results import make_frame

    def build(rates: dict[str, list[float]], baseline: str, **factors):
        rows = [
            {
                "variant": label, "round": number, "order": order, "is_warmup": False, "n_images": 100,
                "startup_s": 0.1, "first_batch_s": 0.01, "steady_s": 100 / rate, "images_per_s": rate,
                "cpu_s": 0.5, "peak_mem_mb": 100.0,
            }
            for order, (label, values) in enumerate(rates.items())
            for number, rate in enumerate(values)
        ]  # fmt: skip
        return make_frame(rows, **{"experiment": "test", "baseline": baseline, **factors})

    return build
