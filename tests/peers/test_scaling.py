"""Predictions for more cores, against arithmetic."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from labkit.peers.run import plot_cores, predict_cores


@pytest.fixture
def table():
    costs = {"jpeg": (1.0, 20.0), "raw": (0.125, 10.0), "a process of its own": (2.0, np.nan)}
    return pd.DataFrame.from_dict(costs, orient="index", columns=["cpu_s_per_1000", "gil_us_per_image"])


def test_rates_grow_with_the_cores_until_the_lock_is_always_held(table):
    found = predict_cores(table, cores=(1, 2, 16, 64)).set_index(["variant", "cores"])
    assert found.loc["jpeg", "images_per_s"].tolist() == [1000, 2000, 16_000, 50_000]
    assert found.loc["raw", "images_per_s"].tolist() == [8000, 16_000, 100_000, 100_000]
    assert found.loc["raw", "n_processes"].tolist() == [1, 1, 2, 6]
    assert set(found["simulated"]) == {"predicted"}
    assert "a process of its own" not in found.index


def test_the_plot_says_what_is_predicted_and_what_is_measured(table):
    measured = pd.DataFrame({"variant": ["raw", "raw"], "cores": [1, 2], "images_per_s": [7900.0, 15_000.0]})
    ax = plot_cores(predict_cores(table), measured)
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert names == ["jpeg", "raw", "predicted: cores, then the lock", "measured"]
    dots = np.concatenate([np.asarray(points.get_offsets()) for points in ax.collections if len(points.get_offsets())])
    assert dots.tolist() == [[1, 7900.0], [2, 15_000.0]]
    plt.close(ax.figure)
