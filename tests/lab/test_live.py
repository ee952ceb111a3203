"""The report of a tour that is running, on notebooks that are not run."""

import json
import re

import pytest

from labkit.app import tour_page as live_module, tour_page as report
from labkit.app.notebooks import Executed, Notebook, find_notebooks
from labkit.app.tour_page import LiveReport, minutes_left
from labkit.measure.frames import save_frame


@pytest.fixture
def notebooks(tmp_path):
    return [Notebook(tmp_path / f"{name}.ipynb", "Why?", "20", seconds) for name, seconds in STORED_S.items()]


STORED_S = {"00_first": 30, "01_second": 60, "02_third": None}


@pytest.fixture
def live(notebooks, tmp_path):
    """A live report whose clock stands still until a test sets `now_s`."""
    live = LiveReport(tmp_path / "results", notebooks, clock=lambda: live.now_s)
    live.now_s = 1000.0
    return live


def _status(live):
    found = re.search(r'<p class="status" role="status">(.*?)</p>', live.path.read_text(), re.DOTALL)
    return found and found[1]


def _reloads(live):
    return 'http-equiv="refresh"' in live.path.read_text()


def test_the_page_tells_what_runs_and_how_long_the_rest_takes(live, notebooks):
    with live:
        assert re.fullmatch(
            r"At \d\d:\d\d: making the photos\. The rest takes about 2 minutes\. This page\sreloads itself .*",
            _status(live),
        )
        live.begin(notebooks[0])
        assert ": running 00_first, notebook 1 of 3. The rest takes about 2 minutes." in _status(live)
        live.now_s += 60
        live.end(Executed(notebooks[0], None, 60.0))
        live.begin(notebooks[1])
        assert ": running 01_second, notebook 2 of 3. The rest takes about 4 minutes. This page" in _status(live)
        assert _reloads(live)
        assert ">00_first</a>" in live.path.read_text()
    assert (_reloads(live), _status(live)) == (False, None)


@pytest.mark.parametrize(
    ("n_ended", "share", "expected"), [(0, 0.0, 2.5), (0, 0.5, 2.25), (1, 0.0, 4.0), (1, 0.5, 1.5), (3, 0.0, 0.0)]
)
def test_the_rest_is_estimated_from_the_stored_run_and_the_pace_of_this_one(notebooks, n_ended, share, expected):
    assert minutes_left(notebooks, n_ended, share, 60.0) == expected


def test_frames_of_the_first_notebook_are_on_the_page_before_it_ends(live, notebooks, frame_of, monkeypatch):
    written = []
    write_index = report.write_index
    monkeypatch.setattr(live_module, "write_index", lambda *args, **kw: written.append(write_index(*args, **kw)))

    def measure(name):
        frame = frame_of({"a": [1, 1.1], "b": [2, 2.2]}, "a", experiment=f"00 {name}")
        save_frame(frame, live.path.parent / "frames" / f"{name}.csv")

    with live:
        live.begin(notebooks[0])
        live.on_cell(1, 4)
        assert len(written) == 2, "nothing new"
        for cell, name in ((2, "one"), (3, "two")):
            measure(name)
            live.on_cell(cell, 4)
            assert f"<td>00 {name}</td>" in live.path.read_text()
            assert "data:image/png;base64," in live.path.read_text()
        assert len(written) == 4
        assert "judged when the tour has ended" in live.path.read_text()
        live.end(Executed(notebooks[0], None, 60.0))
        live.begin(notebooks[1])
        measure("three")
        live.on_cell(1, 4)
        assert "00 three" not in live.path.read_text(), "each page takes time: the next notebook brings it"
    assert "<td>00 three</td>" in live.path.read_text()
    assert "judged when the tour has ended" not in live.path.read_text()


CUT_SHORT = [
    (KeyboardInterrupt(), "was interrupted while running 00_first, notebook 1 of 3."),
    (OSError("no room at https://me:word@here/"), "failed (OSError: no room at https://here/) while running 00_first,"),
]


@pytest.mark.parametrize(("error", "told"), CUT_SHORT, ids=["Ctrl-C", "an error"])
def test_a_tour_that_is_cut_short_leaves_a_page_that_says_so(live, notebooks, error, told):
    def run():
        with live:
            live.begin(notebooks[0])
            raise error

    with pytest.raises(type(error)):
        run()
    assert told in _status(live)
    assert not _reloads(live)


def test_a_damaged_frame_ends_the_tour_at_its_start(live):
    (live.path.parent / "frames").mkdir(parents=True)
    (live.path.parent / "frames" / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"x\.csv is not a frame of runs"), live:
        pass
    assert not live.path.exists()


def test_the_first_plot_is_on_the_page_within_a_minute(tmp_path, runs_of):
    """Of the first notebook, by the order of its cells: as if its stored run's whole time passed before that plot."""
    tour = find_notebooks()
    cells = json.loads(tour[0].path.read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells]
    measuring = next(n for n, source in enumerate(sources) if "experiment=" in source and "rung=False" not in source)
    now_s = 0.0
    with LiveReport(tmp_path / "results", tour, clock=lambda: now_s) as live:
        assert "<h2>Where do I start?" in live.path.read_text()
        live.begin(tour[0])
        for cell in range(measuring + 1):
            live.on_cell(cell, len(cells))
        now_s += tour[0].seconds
        assert PLOT not in live.path.read_text()
        save_frame(runs_of("00 two workers", many=2), tmp_path / "results" / "frames" / "00.csv")
        live.on_cell(measuring + 1, len(cells))
        assert PLOT in live.path.read_text()
        assert now_s <= 60


PLOT = "Measured speed-up of each experiment"
