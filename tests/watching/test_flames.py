"""The flame graph of a report, read back from its SVG: by stacks whose seconds are known."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import labkit as lk
from labkit.watching import timings
from labkit.watching.flames import WIDTH, flame_graph
from labkit.watching.gains import lines_table
from labkit.watching.lines import MAKING, STEP, Stack, lines_of
from tests.watching.trained import train

ITEM, LIBRARY = ("Photos.__getitem__", "/x/train.py"), torch.__file__
OPENED, CONVERTED = (*ITEM, 17), (*ITEM, 18)
INNER = ("Image.convert", LIBRARY, 900), ("<lambda>", LIBRARY, 3)
SECONDS = {
    Stack(MAKING, (OPENED,)): 1.0,
    Stack(MAKING, (CONVERTED, *INNER)): 5.0,
    Stack(MAKING, (CONVERTED, INNER[0])): 1.0,
    Stack(MAKING, (CONVERTED, INNER[0], ("rare", LIBRARY, 9))): 0.04,  # under 0.5 %
    Stack(MAKING, (CONVERTED, ("Compose.__call__", LIBRARY, 5), ("ColorJitter", "", 0))): 3.0,
    Stack(STEP, (("train", "/x/train.py", 40),)): 7.0,
}
TOTAL_S = 10.04


def rectangles(svg):
    """Of each rectangle its tooltip, left edge, width, top and shown words."""
    name = "{http://www.w3.org/2000/svg}"
    for group in ElementTree.fromstring(svg).iter(f"{name}g"):  # noqa: S314 - our own
        rect = group.find(f"{name}rect")
        text = group.find(f"{name}text")
        place = (float(rect.get(each)) for each in ("x", "width", "y"))
        yield (group.find(f"{name}title").text, *place, "" if text is None else text.text)


def widths(svg):
    return {title.partition(",")[0].partition(": ")[0]: width for title, _, width, *_ in rectangles(svg)}


class TestAFlameGraph:
    def test_shows_each_call_as_wide_as_its_share(self):
        found = {title: width for title, _, width, *_ in rectangles(flame_graph(SECONDS, MAKING))}
        assert found == {
            "making a batch: 100.0%, 10.04 s": WIDTH,
            "Photos.__getitem__, /x/train.py:17: 10.0%, 1.00 s": pytest.approx(WIDTH / TOTAL_S, abs=0.02),
            "Photos.__getitem__, /x/train.py:18: 90.0%, 9.04 s": pytest.approx(9.04 * WIDTH / TOTAL_S, abs=0.02),
            f"Image.convert, {LIBRARY}:900: 60.2%, 6.04 s": pytest.approx(6.04 * WIDTH / TOTAL_S, abs=0.02),
            f"<lambda>, {LIBRARY}:3: 49.8%, 5.00 s": pytest.approx(5 * WIDTH / TOTAL_S, abs=0.02),
            f"Compose.__call__, {LIBRARY}:5: 29.9%, 3.00 s": pytest.approx(3 * WIDTH / TOTAL_S, abs=0.02),
            "ColorJitter: 29.9%, 3.00 s": pytest.approx(3 * WIDTH / TOTAL_S, abs=0.02),
        }
        assert widths(flame_graph(SECONDS, STEP)) == {"the step": WIDTH, "train": WIDTH}
        assert flame_graph({}, MAKING) == ""

    def test_has_every_call_below_one_that_is_as_wide_as_all_below_it(self):
        rows = {}
        for _, left, width, top, _ in rectangles(flame_graph(SECONDS, MAKING)):
            rows.setdefault(top, []).append((left, left + width))
        tops = sorted(rows)
        assert len(tops) == 4
        for above, below in pairwise(tops):
            spans = sorted(rows[below])
            assert all(end <= begin + 1e-6 for (_, end), (begin, _) in pairwise(spans))
            assert all(any(b - 1e-6 <= left and right <= e + 1e-6 for b, e in rows[above]) for left, right in spans)

    def test_shows_words_that_fit(self):
        shown = {title: (width, words) for title, _, width, _, words in rectangles(flame_graph(SECONDS, MAKING))}
        assert shown["Photos.__getitem__, /x/train.py:18: 90.0%, 9.04 s"][1] == "/x/train.py:18 Photos.__getitem__"
        assert all(len(words) * 6.7 <= width for width, words in shown.values())
        assert shown["Photos.__getitem__, /x/train.py:17: 10.0%, 1.00 s"][1].endswith("…")

    def test_agrees_with_the_table_of_lines(self):
        found = {title.partition(": ")[0]: width for title, _, width, *_ in rectangles(flame_graph(SECONDS, MAKING))}
        table = lines_table(lines_of(SECONDS))
        for number, of_line in table[table["part"] == MAKING].groupby("number"):
            width = found[f"Photos.__getitem__, /x/train.py:{number}"]
            assert width / WIDTH == pytest.approx(of_line["share"].sum(), abs=1e-4)
        assert set(table["what"]) == {"__getitem__", "convert", "ColorJitter", "train"}

    def test_of_each_part_is_on_the_page_of_a_report(self, tmp_path):
        with lk.watch() as watched:
            train(DataLoader(TensorDataset(torch.zeros(80, 4)), 2))
            sampler = timings.line_sampler()
            sampler.stop()
            sampler.seconds.clear()
            sampler._stepped.clear()
            sampler.seconds.update({stack._replace(loader=0): each for stack, each in SECONDS.items()})
        page = watched.report().save_html(tmp_path / "page.html").read_text()
        making, step = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
        assert (making, step) == (flame_graph(SECONDS, MAKING), flame_graph(SECONDS, STEP))
        assert "<script" not in page
        assert "ColorJitter" in page.partition("</svg>")[2], "the table"
