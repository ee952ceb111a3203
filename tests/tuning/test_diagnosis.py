"""A diagnosis says, draws and shows what its numbers are; where they come from is tests/tuning/test_stalls.py's."""

import base64
import io
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from PIL import Image

from labkit.watching.advice import MIN_SHARE, Costs, Recommendation
from labkit.watching.findings import Diagnosis

SHARES = {"compute": 0.3, "fetch": 0.104, "prepare": 0.4, "copy": 0.004, "hand-over": 0.092, "start": 0.1}
WAITS = "Training waits for its data 70% of the time: prepare 40%, fetch 10%, start 10%, hand-over 9%."


@pytest.fixture
def found() -> Diagnosis:
    costs = Costs(
        step=3.0, copy=0.04, hand_over=0.92, fetch=1.04, prepare=4.0, start=1.0, together=10.0, making=None,
        waiting=0.0, step_cpu=0.0,
    )  # fmt: skip
    advice = Recommendation("workers", "Use <2> workers", "they wait", 2.0, "03_persistent_workers")
    return Diagnosis(SHARES, 3.333, 3.1, 3.5, [advice], costs, None, None, pd.DataFrame(), pd.DataFrame())


def test_what_it_says(found):
    free = "Were data free, it would be 3.33x [3.10, 3.50] as fast"
    assert found.sentences == [WAITS, f"{free}.", str(found.recommendation)]
    assert repr(found).splitlines() == found.sentences
    whole = replace(found, gpu_utilization=0.25, cold=1.52).sentences[1]
    assert whole == (
        f"{free}; the GPU was busy 25% of the time that was measured; from a cold page cache the loader takes 1.5x as "
        "long."
    )
    for cold in (0.8, 1.04):  # no slower from a cold cache, but for noise
        assert replace(found, cold=cold).sentences[1] == f"{free}."
    once = replace(found, ceiling_low=np.nan, ceiling_high=np.nan).sentences[1]
    assert once == "Were data free, it would be 3.33x as fast."


def test_little_is_no_waiting(found):
    little = dict.fromkeys(SHARES, 0.0) | {"compute": 0.97, "fetch": 0.03}
    expected = "Training does not wait for its data: 97% of the time is the step itself."
    assert replace(found, shares=little).sentences[0] == expected
    just_enough = dict.fromkeys(SHARES, 0.0) | {"compute": 1 - MIN_SHARE, "fetch": MIN_SHARE}
    assert replace(found, shares=just_enough).sentences[0].startswith("Training waits")


def test_what_it_draws(found):
    given = plt.subplots()[1]
    plt.subplots()  # another one is the current one
    ax = found.plot(ax=given)
    assert ax is given
    rows = {}
    for bar in ax.patches:
        rows.setdefault(round(bar.get_y() + bar.get_height() / 2), []).append(bar.get_width())
    assert rows[0] == pytest.approx([3.0, *found.costs.lost_s.values()])
    assert rows[1] == pytest.approx([3.0, 0, 0, 0, 0, 0])
    assert [label.get_text() for label in ax.get_yticklabels()] == ["training", "if data were free"]
    assert (ax.get_xlabel(), ax.get_title("left")) == ("seconds per batch", "ceiling: 3.33x")
    assert ax.get_legend().get_texts()[0].get_text() == "compute"


def test_what_it_shows(found):
    n_figures = len(plt.get_fignums())
    page = found._repr_html_()
    assert len(plt.get_fignums()) == n_figures
    head, _, rest = page.partition('src="data:image/png;base64,')
    picture, _, words = rest.partition('">')
    assert head == f'<img alt="{WAITS}" '
    assert words == "".join(f"<p>{each}</p>" for each in found.sentences).replace("<2>", "&lt;2&gt;")
    image = Image.open(io.BytesIO(base64.b64decode(picture)))
    assert (image.format, image.size) == ("PNG", (770, 286))
