"""The fault harness: a few faults through it, and what its judge must see."""

import os
import re
import subprocess
import sys

import pytest

from tests.hardening.faults import commands
from tests.paths import REPO

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the harness reads /proc")
QUICK = "^make_shards / (SIGKILL|unwritable|file-size limit)$"
N_QUICK = 3


@pytest.mark.exhaustive
def test_a_few_faults_through_the_harness():
    command = [sys.executable, "-m", "tests.hardening.faults", "--only", QUICK, "--count", str(N_QUICK)]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    rows = re.findall(r"^ *\d+ +[\d.]+ s  (.+) at .+?: ([\w ]+): (.*)$", done.stdout, re.MULTILINE)
    assert len({case_and_fault for case_and_fault, _, _ in rows}) == N_QUICK
    assert {commands.CLEAR, commands.STOPPED} <= {outcome for _, outcome, _ in rows}
    assert all(message for _, outcome, message in rows if outcome == commands.CLEAR)


def test_files_that_are_half_foreign_or_missing_are_seen():
    whole = {"out/a.jpg": b"12345678", "out/set.json": b'{"a": 1}'}
    unfinished = {**whole, "out/.12-0123abcd.partial": b"half"}  # has no final name
    assert commands.judge_files(unfinished, whole) == commands.judge_final_files(whole, whole) == []
    assert commands.judge_final_files(unfinished, whole) == ["left over: out/.12-0123abcd.partial"]
    assert commands.judge_files({**whole, "out/b.jpg": b"1"}, whole) == ["a file that no whole run has: out/b.jpg"]
    half = {**whole, "out/set.json": b'{"a"'}
    for may_differ in ("$.", "json$"):
        [seen] = commands.judge_files(half, whole, may_differ)
        assert seen.startswith("half file under a final name: out/set.json (")
    assert commands.judge_final_files(half, whole) == ["not as in an undisturbed run: out/set.json (other bytes)"]
    assert commands.judge_final_files({}, whole) == ["missing: out/a.jpg", "missing: out/set.json"]


def test_what_is_left_behind_is_seen(tmp_path):
    environment = {**os.environ, "LABKIT_FAULT_RUN": "planted"}
    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    orphan = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, start_new_session=True)
    orphan.stdout.readline()
    (tmp_path / "pymp-planted").mkdir()
    left = commands.end_processes("planted", session=-1, within_s=0)
    assert orphan.wait(10) == -9  # the judge has ended it
    orphan.stdout.close()
    wrong = commands.judge_leftovers(left, {"torch_planted", "other"}, tmp_path)
    assert "orphan" in wrong[0]
    assert "time.sleep(60)" in wrong[0]
    assert wrong[1:] == ["leaked in /dev/shm: torch_planted", "leaked in TMPDIR: pymp-planted"]
    assert commands.end_processes("planted", session=-1, within_s=0) == {}
