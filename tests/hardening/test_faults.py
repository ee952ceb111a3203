"""The fault harness: a few faults through it, and what its judge must see."""

import os
import re
import subprocess
import sys

import pandas as pd
import pytest

from tests.hardening.faults import commands
from tests.hardening.inputs import image_bytes
from tests.paths import REPO

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the harness reads /proc")
# Kills amid changes, a full file, a read-only folder.
QUICK = (
    r"^make_shards / (SIGKILL|unwritable|file-size limit)$|^make_pixels / SIGKILL$|^labkit convert / file-size limit"
)
N_QUICK = 5


@pytest.mark.exhaustive
def test_a_few_faults_through_the_harness(tmp_path):
    record, count = tmp_path / "faults.csv", ["--count", str(N_QUICK)]
    command = [sys.executable, "-m", "tests.hardening.faults", "--only", QUICK, *count, "--record", record]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    rows = re.findall(r"^ *\d+ +[\d.]+ s  (.+) at .+?: ([\w ]+): (.*)$", done.stdout, re.MULTILINE)
    assert len({case_and_fault for case_and_fault, _, _ in rows}) == N_QUICK
    assert {commands.CLEAR, commands.STOPPED} <= {outcome for _, outcome, _ in rows}
    assert all(message for _, outcome, message in rows if outcome == commands.CLEAR)
    table = pd.read_csv(record, index_col="fault")
    assert table.loc["all", "injected"] == N_QUICK == table.loc["all", list(commands.OUTCOMES)].sum()
    assert not table["violations"].any()
    assert {"SIGKILL", "file-size limit", "unwritable"} <= set(table.index)


@pytest.fixture
def whole(tmp_path) -> commands.Tree:
    """The files of an undisturbed run: a photo, a frame, a manifest."""
    out = tmp_path / "out"
    (out / "set").mkdir(parents=True)
    (out / "set" / "a.jpg").write_bytes(image_bytes((64, 64), "JPEG"))
    (out / "runs.csv").write_text("variant,round\none,0\ntwo,0\n")
    (out / "set.json").write_text('{"a": 1}')
    return commands.read_tree(tmp_path)


def test_what_is_whole_is_whole_and_the_rest_is_seen(whole, tmp_path):
    assert commands.judge_files(tmp_path, whole, whole) == commands.judge_final_files(tmp_path, whole, whole) == []
    (tmp_path / "out/.12-0123abcd.partial").write_bytes(b"half")  # has no final name
    assert commands.judge_files(tmp_path, commands.read_tree(tmp_path), whole) == []
    (tmp_path / "out/b.jpg").write_bytes(b"foreign")
    found = commands.read_tree(tmp_path)
    assert commands.judge_files(tmp_path, found, whole) == ["a file that no whole run has: out/b.jpg"]
    left = ["left over: out/.12-0123abcd.partial", "left over: out/b.jpg"]
    assert commands.judge_final_files(tmp_path, found, whole) == left


@pytest.mark.parametrize("name", ["set/a.jpg", "runs.csv", "set.json"])
def test_a_half_file_is_seen(whole, tmp_path, name):
    path = tmp_path / "out" / name
    path.write_bytes(path.read_bytes()[:-4])
    found = commands.read_tree(tmp_path)
    for may_differ in ("$.", "."):  # by comparison, or by another reader where the contents may differ
        seen = commands.judge_files(tmp_path, found, whole, may_differ)
        assert [text.partition(" (")[0] for text in seen] == [f"half file under a final name: out/{name}"]
    for timed in (False, True):
        [seen] = commands.judge_final_files(tmp_path, found, whole, timed)
        assert seen.startswith(f"not as in an undisturbed run: out/{name}")
    path.unlink()
    missing = [f"missing: out/{name}"]
    assert commands.judge_final_files(tmp_path, commands.read_tree(tmp_path), whole) == missing


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
