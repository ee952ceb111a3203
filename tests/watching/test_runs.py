"""Two watched runs side by side, and a run against its budget: by reports whose truth is known."""

import json
import os
import re
import subprocess
import sys
from copy import deepcopy

import numpy as np
import pytest
import torch
import yaml
from torch.utils.data import DataLoader, TensorDataset

import labkit as lk
from labkit.app.cli import main
from labkit.errors import ArgumentError
from labkit.util.arguments import REPORT_BEGINNINGS
from labkit.util.files import check_own_file
from labkit.watching.diff import compare_runs, judge_budget, parse_budget
from labkit.watching.program import OVER_BUDGET
from labkit.watching.report import SHARES
from tests.pages import TEXTS, blocks
from tests.paths import invoke
from tests.watching.trained import ENVIRONMENT, watch_script, watched_while

MACHINE = {"cpu": "one", "usable_cores": 2, "memory_gib": 8, "gpu": "", "torch": "2.14"}


def report(ms, *, step_ms=10.0, noise=0.02, seed=0, n_blocks=20, **changed):
    """What `watch` would write of a training that waits `ms` for a batch; `noise` is that of a block."""
    draws = np.random.default_rng(seed).normal(1, noise, (2, n_blocks))
    blocks = {name: np.zeros(n_blocks) for name in SHARES} | {"compute": step_ms * draws[0], "prepare": ms * draws[1]}
    total = sum(each.mean() for each in blocks.values())
    return {
        "shares": {name: each.mean() / total for name, each in blocks.items()},
        "blocks_s": {name: (each / 1e3).tolist() for name, each in blocks.items()},
        "settings": {"num_workers": 1, "batch_size": 4}, "machine": MACHINE, "others_share": 0.0,
    } | deepcopy(changed)  # fmt: skip


@pytest.fixture
def compared(tmp_path):
    def compare(*reports):
        for number, each in enumerate(reports):
            (tmp_path / f"{number}.json").write_text(json.dumps(each))
        return compare_runs(*(tmp_path / f"{number}.json" for number in range(2)))

    return compare


class TestRuns:
    def test_that_differ_by_a_fifth_are_told_apart_with_the_true_ratio(self, compared):
        time, waiting, prepare = compared(report(10.0), report(14.0, seed=1))
        own, other = (float(word) for word in re.findall(r"([\d.]+) ms", time))
        assert [own, other] == pytest.approx([20 / 4, 24 / 4], rel=0.02)
        ratio, low, high = (float(word.strip("[],x")) for word in time.split(": ")[1].replace("x", " ").split()[:3])
        assert low < 20 / 24 < high < 1
        assert ratio == pytest.approx(20 / 24, rel=0.02)
        assert time.endswith("slower")
        assert compared(report(14.0, seed=1), report(10.0))[0].endswith("faster")
        assert waiting.startswith("waiting 50.")
        assert waiting.endswith("more")
        assert [float(part) for part in waiting.partition("[")[2].partition("]")[0].split(", ")] == [
            pytest.approx(100 * (14 / 24 - 1 / 2), abs=3) for _ in range(2)
        ]
        assert prepare.startswith("making batches ")

    def test_have_the_ratio_of_their_times_also_where_a_few_blocks_are_slow(self, compared):
        slow = report(10.0)
        slow["blocks_s"]["prepare"][3] = slow["blocks_s"]["prepare"][9] = 1.0
        own, other, ratio = (float(word) for word in re.findall(r"([\d.]+)(?: ms|x)", compared(slow, report(4.0))[0]))
        assert (own, own / other) == (pytest.approx(20 / 4, rel=0.02), pytest.approx(ratio, rel=0.01))

    def test_that_are_twins_are_told_apart_in_one_of_a_hundred_at_most(self, compared):
        told = [
            compared(report(10.0, seed=2 * number, noise=0.1), report(10.0, seed=2 * number + 1, noise=0.1))
            for number in range(100)
        ]
        assert sum(not line.endswith("inconclusive") for lines in told for line in lines) <= 3

    def test_that_differ_by_less_than_the_margin_are_inconclusive(self, compared):
        assert all(
            line.endswith("inconclusive") for line in compared(report(10.0, noise=1e-4), report(10.8, noise=1e-4))
        )

    def test_name_what_else_differs(self, compared):
        settings = {"num_workers": 2, "batch_size": 4, "pin_memory": True}
        other = report(10.0, settings=settings, machine=MACHINE | {"torch": "2.15"})
        assert compared(report(10.0), other)[:2] == [
            "differs: num_workers 1 -> 2; pin_memory none -> True", "on: torch 2.14 -> 2.15",
        ]  # fmt: skip

    def test_of_other_machines_are_compared_by_shares_alone(self, compared):
        on, time, waiting, _ = compared(report(10.0), report(40.0, machine=MACHINE | {"cpu": "two"}))
        assert on == "on: cpu one -> two"
        assert time == "time: not compared, since the machines differ; shares are"
        assert waiting.endswith("more")

    def test_beside_other_programs_are_inconclusive(self, compared):
        first, *others = compared(report(10.0), report(40.0, others_share=0.5))
        assert first == "disturbed: other programs used 0% and 50% of the cores: watch both again without them"
        assert all(line.endswith("inconclusive") for line in others)

    def test_of_batches_of_other_sizes_are_compared_by_image_or_else_by_batch(self, compared):
        sized = report(30.0, step_ms=10.0, settings={"num_workers": 1, "batch_size": 8})
        time = compared(report(10.0), sized)[1]
        assert " 1.00" in time or " 0.99" in time
        assert time.endswith("inconclusive")
        unsized = report(10.0, settings={"num_workers": 1, "batch_size": None})
        assert any(re.match(r"time of a batch (20|19\.)", line) for line in compared(report(10.0), unsized))

    def test_with_too_few_blocks_have_no_interval(self, compared):
        assert all(line.endswith("inconclusive") for line in compared(report(10.0, n_blocks=1), report(90.0)))

    @pytest.mark.parametrize("text", ["{}", "\udcff" * 9999, '{"shares": {"compute": 1}}'])
    def test_of_other_files_are_refused(self, tmp_path, text):
        (tmp_path / "a.json").write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(ArgumentError, match="is not a report of `labkit watch --json`") as caught:
            compare_runs(tmp_path / "a.json", tmp_path / "a.json")
        assert len(str(caught.value)) < 400  # without what is in the file
        done = invoke(main, ["diff", str(tmp_path / "a.json"), str(tmp_path / "none.json")])
        assert (done.exit_code, done.output.count("\n")) == (2, 1)

    def test_are_known_as_its_own_by_the_command_with_the_page(self, tmp_path):
        report = watched_while(DataLoader(TensorDataset(torch.zeros(80, 4)), 4)).report()
        written = report.save_json(tmp_path / "json"), report.save_html(tmp_path / "html")
        for path, other in zip(written, reversed(written), strict=True):
            check_own_file(path, REPORT_BEGINNINGS[path.name], what="report")
            with pytest.raises(ArgumentError, match="exists and is no report: choose another name"):
                check_own_file(other, REPORT_BEGINNINGS[path.name], what="report")

    def test_are_what_watch_writes(self, tmp_path):
        """Of a real training, whose blocks give the shares of its report."""
        watched = watched_while(DataLoader(TensorDataset(torch.zeros(400, 4)), 4, num_workers=1))
        path = watched.report().save_json(tmp_path / "a.json")
        found = json.loads(path.read_bytes())
        blocks = {name: np.mean(seconds) for name, seconds in found["blocks_s"].items()}
        shares = {name: seconds / sum(blocks.values()) for name, seconds in blocks.items()}
        assert shares["compute"] == pytest.approx(found["shares"]["compute"], abs=0.02)
        assert (found["settings"]["batch_size"], found["settings"]["num_workers"]) == (4, 1)
        assert found["machine"]["usable_cores"] == lk.usable_cores()
        lines = invoke(main, ["diff", str(path), str(path)]).output.splitlines()
        assert all(line.endswith("inconclusive") for line in lines if not line.startswith("disturbed"))


class TestABudget:
    @pytest.mark.parametrize(
        ("text", "budget"),
        [
            ("", {}),
            ("waiting=5%", {"waiting": 0.05}),
            ("copy=0.01, hand-over=2.5%", {"copy": 0.01, "hand-over": 0.025}),
        ],
    )
    def test_is_read_as_shares(self, text, budget):
        assert parse_budget(text) == pytest.approx(budget)

    @pytest.mark.parametrize("text", ["waiting", "wait=5%", "waiting=5", "waiting=nan"])
    def test_of_anything_else_is_refused_with_what_is_accepted(self, text):
        with pytest.raises(ArgumentError, match=r"a budget is like waiting=5%, with one of waiting, fetch.*; got"):
            parse_budget(text)
        assert invoke(main, ["watch", "--budget", text, "train.py"]).exit_code == 2

    def test_is_exceeded_beyond_doubt_or_cannot_be_judged(self):
        run = report(10.0)
        assert judge_budget(run, {"waiting": 0.6, "prepare": 0.5}) == []
        [said] = judge_budget(run, {"waiting": 0.4, "copy": 0.1})
        assert said.startswith("over the budget: waiting is 50.")
        assert said.endswith("and may be 40.0%")
        [said] = judge_budget(report(10.0, n_blocks=1), {"waiting": 0.9})
        assert "cannot be judged" in said

    def test_cannot_be_judged_by_a_few_steps_that_may_be_beyond_it(self):
        run = report(10.0, noise=0.3) | {"n_batches": 17}
        assert judge_budget(run, {"waiting": 0.9}) == []
        [said] = judge_budget(run, {"waiting": 0.5})
        assert said.endswith("cannot be judged: 17 steps were counted, and 20 are needed")
        assert judge_budget(run | {"n_batches": 20}, {"waiting": 0.5}) == []

    @pytest.mark.parametrize(
        ("budget", "end", "status"),
        [
            ("waiting=99%", "", 0), ("waiting=1%", "sys.exit(7)", 7), ("waiting=1%", "os._exit(0)", OVER_BUDGET),
            ("waiting=1%", "import threading; threading.Thread(target=train).start(); sys.exit()", OVER_BUDGET),
            ("waiting=1%", "import concurrent.futures as c; p = c.ThreadPoolExecutor(1); p.submit(int)", OVER_BUDGET),
        ],
    )  # fmt: skip
    @pytest.mark.exhaustive
    def test_sets_the_status_of_a_script_that_ends_well(self, tmp_path, budget, end, status):
        (tmp_path / "train.py").write_text(f"{TRAINING}\n{end}\n")
        done = watch_script("--budget", budget, tmp_path / "train.py")
        assert done.returncode == status, done.stderr
        assert ("over the budget: waiting is " in done.stderr) == (budget == "waiting=1%")

    @pytest.mark.exhaustive
    def test_leaves_the_status_of_processes_that_are_forked_after_its_report(self, tmp_path):
        forks = "if not (child := os.fork()):\n    os._exit(0)\nprint('child', os.waitpid(child, 0)[1])"
        (tmp_path / "train.py").write_text(f"{TRAINING}\n{forks}\n")
        done = watch_script("--budget", "waiting=1%", "--steps", "20", "train.py", cwd=tmp_path)
        assert "over the budget" in done.stderr, done.stderr
        assert (done.stdout, done.returncode) == ("child 0\n", OVER_BUDGET)

    @pytest.mark.exhaustive
    def test_fails_the_workflow_of_the_page_and_leaves_its_file(self, tmp_path):
        workflow = yaml.safe_load(blocks(TEXTS["reference"], "yaml")[0].text)
        _, step, keep = workflow["jobs"]["waiting"]["steps"]
        (tmp_path / "train.py").write_text(TRAINING)
        folders = [os.path.dirname(sys.executable), os.environ["PATH"]]
        environment = {**ENVIRONMENT, "PATH": os.pathsep.join(folders)}
        shell = ["bash", "-e", "-c", step["run"]]  # as Actions runs it
        done = subprocess.run(
            shell, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250, check=False
        )
        assert done.returncode == OVER_BUDGET, done.stderr
        assert keep["if"] == "always()"
        assert "blocks_s" in json.loads((tmp_path / keep["with"]["path"]).read_text())


TRAINING = """
import os, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset

def collate(samples):
    time.sleep(0.002)
    return torch.stack([sample for sample, in samples])

def train():
    model = torch.nn.Linear(4, 1)
    steps = torch.optim.SGD(model.parameters(), 0.1)
    for batch in DataLoader(TensorDataset(torch.zeros(80, 4)), 2, collate_fn=collate):
        model(batch).mean().backward()
        steps.step()

train()
"""
