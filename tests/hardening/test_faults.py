"""The fault harness: a few faults through it, and what its judge must see."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from tests.hardening.faults import judge, sandbox
from tests.hardening.inputs import image_bytes
from tests.paths import REPO
from tests.tars import make_tar

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the harness reads /proc")
# A kill amid changes, full disks, a truncated source, a bad server, a worker that dies: all in forks.
QUICK = (
    r"^make_shards / (SIGKILL|file-size limit|source truncate)$|^make_pixels / SIGKILL$"
    r"|^labkit convert / file-size limit"
    r"|^PixelStore / source truncate|^TarStore over HTTP / server other range, always"
    r"|^make_loader fork persistent / worker SIGKILL"
)
N_QUICK = 8


@pytest.mark.exhaustive
def test_a_few_faults_through_the_harness(tmp_path):
    pytest.importorskip("moto.server", reason='moto is not installed: python -m pip install -e ".[test]"')
    record, count = tmp_path / "faults.csv", ["--count", str(N_QUICK)]
    command = [sys.executable, "-m", "tests.hardening.faults", "--only", QUICK, *count, "--record", record]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    rows = re.findall(r"^ *\d+ +[\d.]+ s  (.+) at .+?: ([\w ]+): (.*)$", done.stdout, re.MULTILINE)
    assert len({case_and_fault for case_and_fault, _, _ in rows}) == N_QUICK
    assert {judge.CLEAR, judge.STOPPED} <= {outcome for _, outcome, _ in rows}
    assert all(message for _, outcome, message in rows if outcome == judge.CLEAR)
    table = pd.read_csv(record, index_col="fault")
    assert table.loc["all", "injected"] == N_QUICK == table.loc["all", list(judge.OUTCOMES)].sum()
    assert not table["violations"].any()
    assert {"SIGKILL", "file-size limit", "source", "server", "worker"} <= set(table.index)


@pytest.fixture
def whole(tmp_path) -> judge.Tree:
    """The files of an undisturbed run: a photo, a tar, a frame, a manifest."""
    out = tmp_path / "out"
    (out / "set").mkdir(parents=True)
    (out / "set" / "a.jpg").write_bytes(image_bytes((64, 64), "JPEG"))
    make_tar(out / "set.tar", {"a.jpg": image_bytes((64, 64), "JPEG")})
    (out / "runs.csv").write_text("variant,round\none,0\ntwo,0\n")
    (out / "set.json").write_text('{"a": 1}')
    return judge.read_tree(tmp_path, ("out",))


def test_what_is_whole_is_whole(whole, tmp_path):
    assert judge.judge_files(tmp_path, whole, whole) == judge.judge_final_files(tmp_path, whole, whole) == []
    (tmp_path / "out/.12-0123abcd.partial").write_bytes(b"half")  # has no final name
    found = judge.read_tree(tmp_path, ("out",))
    assert judge.judge_files(tmp_path, found, whole) == []
    assert judge.judge_final_files(tmp_path, found, whole) == ["left over: out/.12-0123abcd.partial"]


@pytest.mark.parametrize("name", ["set/a.jpg", "set.tar", "runs.csv", "set.json"])
@pytest.mark.parametrize("evolves", [(), ("out/*",)])
def test_a_half_file_is_seen(whole, tmp_path, name, evolves):
    """By comparison, or by another reader if the contents may differ."""
    path = tmp_path / "out" / name
    path.write_bytes(path.read_bytes()[:-4])
    found = judge.read_tree(tmp_path, ("out",))
    [seen] = judge.judge_files(tmp_path, found, whole, evolves)
    assert seen.startswith(f"half file under a final name: out/{name}")
    assert len(judge.judge_final_files(tmp_path, found, whole)) == 2
    path.unlink()
    assert judge.judge_final_files(tmp_path, judge.read_tree(tmp_path, ("out",)), whole) == [f"missing: out/{name}"]


def test_a_foreign_file_and_a_half_extracted_one_are_seen(whole, tmp_path):
    tree = tmp_path / "out/.extract/set/tree"
    tree.mkdir(parents=True)
    (tree / "a.jpg").write_bytes(b"half")
    (tmp_path / "out/b.jpg").write_bytes(b"foreign")
    found = judge.read_tree(tmp_path, ("out",))
    assert sorted(judge.judge_files(tmp_path, found, whole)) == [
        "a file that no whole run has: out/b.jpg",
        "half file among the whole ones: out/.extract/set/tree/a.jpg",
    ]


HEADER = "experiment,variant,round,n_images,first_batch_s,steady_s,images_per_s\n"
ROWS = ["e,one,0,4,1.0,1.0,2.0\n", "e,two,0,4,1.0,3.0,1.0\n"]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (ROWS, None),
        (ROWS[:1], "has 1 rows, not 2"),
        ([ROWS[0], ROWS[0]], "has 2 rows, not 2, one for each run"),
        ([ROWS[0], ROWS[1].replace("e,", "other,")], "holds another experiment"),
        ([ROWS[0], ROWS[1].replace("1.0\n", "1.5\n")], "says 1.5 images/s for 4.0 in 1.0"),
        ([ROWS[0], "e,two,0,4,1.0,,1.0\n"], "says 1.0 images/s"),
    ],
)
def test_a_wrong_row_is_seen(tmp_path, rows, said):
    (tmp_path / "runs.csv").write_text(HEADER + "".join(rows))
    wrong = judge.judge_frame(tmp_path / "runs.csv", 2, "e")
    assert wrong == [] if said is None else any(said in text for text in wrong)


def test_a_wrong_size_is_seen():
    wanted = b"path,width,error\na.jpg,10,\nb.jpg,20,\n"
    assert judge.judge_size_rows(b"path,width,error\na.jpg,10,\nb.jpg,,cut\n", wanted) == []
    assert judge.judge_size_rows(b"path,width,error\na.jpg,11,\nb.jpg,20,\n", wanted)
    assert judge.judge_size_rows(b"path,width,error\n", wanted)


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ("make_photos: out/set: no room\n", None),
        ("Traceback (most recent call last):\n  ...\nOSError: out/set\n", "a traceback: OSError: out/set"),
        ("make_photos: no room\n", "names no file"),
        ("no room in out/set\n", "not one line"),
        ("make_photos: no room in out/set\nand\nmore\n", "not one line"),
        ("", "not one line"),
    ],
)
def test_an_unclear_error_is_seen(said, wrong):
    found = judge.judge_message(said, ("out/set",), "make_photos")
    assert found == [] if wrong is None else wrong in found[0]


def test_what_is_left_behind_is_seen(tmp_path):
    environment = {**os.environ, sandbox.MARKER: "planted"}
    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    orphan = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, start_new_session=True)
    orphan.stdout.readline()
    before, segment = sandbox.list_shared_memory(), Path("/dev/shm/torch_planted")
    segment.write_bytes(b"")
    (tmp_path / "pymp-planted").mkdir()
    try:
        new = sandbox.list_shared_memory() - before
        left = sandbox.kill_leftovers("planted", session=-1, within_s=0)
    finally:
        segment.unlink()
    assert orphan.wait(10) == -9  # the judge has ended it
    orphan.stdout.close()
    wrong = judge.judge_leftovers(left, new, tmp_path)
    assert [text.partition(":")[0] for text in wrong] == ["orphan", "leaked in /dev/shm", "leaked in TMPDIR"]
    assert "time.sleep(60)" in wrong[0]
    assert sandbox.kill_leftovers("planted", session=-1, within_s=0) == {}
