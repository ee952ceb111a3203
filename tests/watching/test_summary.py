"""The ten lines of a report: what is a share of what, and what is left out of them."""

import re
from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from labkit.watching.lines import MAKING, STEP
from labkit.watching.linux import Memory
from labkit.watching.resources import Resources
from labkit.watching.script import Terminal
from tests.watching.trained import watched_while

WAITS = {"compute": 0.3, "fetch": 0.104, "prepare": 0.4, "copy": 0.004, "hand-over": 0.092, "start": 0.1}
WORKS = {"compute": 0.99, "fetch": 0.0, "prepare": 0.01, "copy": 0.0, "hand-over": 0.0, "start": 0.0}
LINES = [
    {"part": part, "share": share, "what": what, "path": path, "number": number, "kind": kind}
    for part, share, what, path, number, kind in (
        (MAKING, 0.62, "ColorJitter", "train.py", 41, "transform"),
        (MAKING, 0.30, "convert", "data.py", 18, "decoding"),
        (MAKING, 0.04, "open", "data.py", 17, "decoding"),
        (STEP, 0.80, "backward", "train.py", 50, ""),
    )
]


@pytest.fixture(scope="module")
def seen():
    """A report that was made, of which the tests replace what they are about."""
    return watched_while(DataLoader(TensorDataset(torch.zeros(120, 4)), 2)).report()


@pytest.fixture
def report(seen):
    memory = Memory(2 * 10**9, 4, 10**9, 0, 0.0, 6 * 10**9)
    return replace(
        seen, shares=WAITS, ceiling=2.0, ceiling_low=1.5, ceiling_high=2.5, is_bound=False, notes=[], slow="",
        tables={**seen.tables, "lines": LINES}, resources=Resources(usable_cores=8, num_workers=4, memory=memory),
        others_share=0.0,
    )  # fmt: skip


def rows_of(report):
    """The texts of each label."""
    found, label = {}, ""
    for line in repr(report).splitlines()[1:]:
        label = line[2:20].strip() or label
        found.setdefault(label, []).append(line[20:])
    return found


def text_of(report, label):
    return " ".join(rows_of(report)[label])


def test_each_reason_has_its_share_of_the_time_and_they_are_all_of_the_waiting(report):
    rows = rows_of(report)
    assert rows["waiting for data"] == [
        "70% of the run; without waiting, 2.0 times [1.50, 2.5] as fast",
    ]
    reasons = rows["because"]
    assert reasons[0] == "40% of the run: waiting for batches to be decoded and augmented"
    assert [int(reason.partition("%")[0]) for reason in reasons] == [40, 10, 10, 9]
    few = WAITS | {"compute": 0.53, "prepare": 0.36, "hand-over": 0.022, "start": 0.02, "fetch": 0.064}
    assert rows_of(replace(report, shares=few))["because"][-1] == "5% of the run: other reasons"
    assert "because" not in rows_of(replace(report, shares=WORKS))


@pytest.mark.parametrize(
    ("ceiling", "words"),
    [
        ({"is_bound": True}, "without waiting, at least 1.50 times as fast"),
        ({"is_bound": True, "ceiling_low": 0.7}, "too few steps were seen to say what that costs"),
        ({"ceiling": 2000.0}, "the step is hardly anything beside it"),
        ({"n_batches": 3}, "; advice needs 20 steps after the warm-up"),
        ({"ceiling": 123.4, "ceiling_low": 54.0, "ceiling_high": 210.0}, "123 times [54, 210] as fast"),
    ],
)
def test_a_ceiling_is_told_as_far_as_it_is_known(report, ceiling, words):
    [told] = rows_of(replace(report, **ceiling))["waiting for data"]
    assert told.startswith("70% of the run")
    assert told.endswith(words)


def test_lines_are_those_of_what_training_waits_for_else_those_of_the_step(report):
    assert rows_of(report)["slow lines"] == [
        "as shares of the time to make a batch:",
        " 62%  ColorJitter         train.py:41",
        " 30%  convert (decoding)  data.py:18",
    ]
    assert rows_of(replace(report, shares=WORKS))["the step"] == ["its slowest lines:", " 80%  backward  train.py:50"]


def test_a_training_that_does_not_wait_reads_so_first_and_what_there_is_to_spare(report):
    settings = {**report.settings, "num_workers": 8}
    costs = replace(report.costs, together=0.1, making=0.35)
    lines = repr(replace(report, shares=WORKS, settings=settings, costs=costs)).splitlines()
    assert lines[1] == "  waiting for data  1% of the run: the loader keeps up"
    assert lines[2] == "  headroom          the loader could feed 2.3 times this rate: 4 of 8 workers would do"


def test_slow_lines_and_files_are_told_where_faster_batches_would_help(report):
    starts = dict.fromkeys(WAITS, 0.0) | {"compute": 0.1, "start": 0.9}
    rows = rows_of(replace(report, shares=starts, slow="1 of 9 samples ..."))
    assert {"slow lines", "slow files", "the step"}.isdisjoint(rows)
    assert "slow files" in rows_of(replace(report, slow="1 of 9 samples ..."))


def test_memory_scarce_resources_and_notes_have_a_row_each(report):
    resources = replace(report.resources, files_limit=100, files_open=99)
    rows = rows_of(replace(report, resources=resources, notes=["One.", "Two."]))
    memory = "2.0 GB of RAM in the training process, 1.0 GB in each of 4 workers; room for 6 more workers"
    assert (" ".join(rows["memory"]), rows["note"]) == (memory, ["One.", "Two."])
    assert rows["machine"][0].startswith("99 of 100 files were open: raise the limit (ulimit -n)")
    assert {"machine", "note", "slow files"}.isdisjoint(rows_of(report))


def test_it_is_short_and_verbose_adds_all_else(report, capfd):
    Terminal().show(report, is_verbose=False)
    short = capfd.readouterr().err
    assert short.startswith(f"\n{report!r}\n")
    assert len(short.splitlines()) <= 17
    assert max(map(len, short.splitlines())) <= 90
    Terminal().show(report, is_verbose=True)
    verbose = capfd.readouterr().err
    assert verbose.startswith(f"\n{report!r}\n")
    assert all(sentence in verbose for sentence in report.details)
    assert re.search(r"^making batches +40\.0%  #{16}$", verbose, re.MULTILINE)
    assert re.search(r"^DataLoader 0 +training ", verbose, re.MULTILINE)


def test_words_of_our_own_are_in_neither(report, tmp_path):
    page = report.save_html(tmp_path / "page.html").read_text()
    for text in (repr(report), *report.details, page):
        assert not re.search(r"hand-over|\bfetch\b|\bprepare\b", text)
