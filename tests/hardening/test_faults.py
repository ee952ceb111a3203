"""The fault harness: a few faults through it, quickly; and that its judge sees what it must see."""

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from tests.hardening.faults import judge
from tests.hardening.faults.record import read_rows
from tests.paths import REPO

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the harness reads /proc")
REPO = REPO
# A kill amid changes, full disks, a source that is cut, a bad server, a worker that dies: all by forks.
QUICK = (
    r"^make_shards / (SIGKILL|file-size limit|source truncate)$|^make_pixels / SIGKILL$"
    r"|^labkit convert / file-size limit"
    r"|^PixelStore / source truncate|^TarStore over HTTP / server other range, always"
    r"|^make_loader fork persistent / worker SIGKILL"
)
N_QUICK = 8


def test_a_few_faults_through_the_harness(tmp_path):
    pytest.importorskip("moto.server", reason='moto is not installed: python -m pip install -e ".[test]"')
    record, count = tmp_path / "faults.csv", ["--count", str(N_QUICK)]
    command = [sys.executable, "-m", "tests.hardening.faults", "--only", QUICK, *count, "--record", record]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    said = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, check=False)
    assert (said.returncode, said.stderr) == (0, ""), said.stdout
    rows = read_rows(record)
    assert len({(row["case"], row["fault"]) for row in rows}) == N_QUICK
    assert {"clear error", "stopped"} <= {row["outcome"] for row in rows}
    assert {row["violations"] for row in rows} == {""}
    assert all(row["message"] for row in rows if row["outcome"] == "clear error")
    assert re.search(rf"\nall +{N_QUICK} ", said.stdout)


@pytest.fixture
def whole(tmp_path) -> judge.Tree:
    """What an undisturbed run left: a photo, a tar, a frame, a folder that was extracted."""
    out = tmp_path / "out"
    (out / "set").mkdir(parents=True)
    Image.new("RGB", (64, 64)).save(out / "set" / "a.jpg")
    with tarfile.open(out / "set.tar", "w") as tar:
        tar.add(out / "set" / "a.jpg", "a.jpg")
    (out / "runs.csv").write_text("variant,round\none,0\ntwo,0\n")
    (out / "set.json").write_text('{"a": 1}')
    return judge.tree_of(tmp_path, ("out",))


def test_what_is_whole_is_whole(whole, tmp_path):
    assert judge.after_fault(tmp_path, whole, whole) == judge.after_rerun(tmp_path, whole, whole) == []
    (tmp_path / "out/.12-0123abcd.partial").write_bytes(b"half")  # has no final name
    found = judge.tree_of(tmp_path, ("out",))
    assert judge.after_fault(tmp_path, found, whole) == []
    assert judge.after_rerun(tmp_path, found, whole) == ["left over: out/.12-0123abcd.partial"]


@pytest.mark.parametrize("name", ["set/a.jpg", "set.tar", "runs.csv", "set.json"])
@pytest.mark.parametrize("evolves", [(), ("out/*",)])
def test_a_half_file_is_seen(whole, tmp_path, name, evolves):
    """By comparison; and where contents may differ, by another reader."""
    path = tmp_path / "out" / name
    path.write_bytes(path.read_bytes()[:-4])
    found = judge.tree_of(tmp_path, ("out",))
    [seen] = judge.after_fault(tmp_path, found, whole, evolves)
    assert seen.startswith(f"half file under a final name: out/{name}")
    assert len(judge.after_rerun(tmp_path, found, whole)) == 2
    path.unlink()
    assert judge.after_rerun(tmp_path, judge.tree_of(tmp_path, ("out",)), whole) == [f"missing: out/{name}"]


def test_a_foreign_file_and_a_half_extracted_one_are_seen(whole, tmp_path):
    tree = tmp_path / "out/.extract/set/tree"
    tree.mkdir(parents=True)
    (tree / "a.jpg").write_bytes(b"half")
    (tmp_path / "out/b.jpg").write_bytes(b"foreign")
    found = judge.tree_of(tmp_path, ("out",))
    assert sorted(judge.after_fault(tmp_path, found, whole)) == [
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
    wrong = judge.wrong_frame(tmp_path / "runs.csv", 2, "e")
    assert wrong == [] if said is None else any(said in text for text in wrong)


def test_a_wrong_size_is_seen():
    wanted = b"path,width,error\na.jpg,10,\nb.jpg,20,\n"
    assert judge.wrong_rows(b"path,width,error\na.jpg,10,\nb.jpg,,cut\n", wanted) == []
    assert judge.wrong_rows(b"path,width,error\na.jpg,11,\nb.jpg,20,\n", wanted)
    assert judge.wrong_rows(b"path,width,error\n", wanted)


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
    found = judge.unclear(said, ("out/set",), "make_photos")
    assert found == [] if wrong is None else wrong in found[0]


def test_what_is_left_behind_is_seen(tmp_path):
    from tests.hardening.faults import sandbox

    environment = {**os.environ, sandbox.MARKER: "planted"}
    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    orphan = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, start_new_session=True)
    orphan.stdout.readline()
    before, segment = sandbox.shared_memory(), Path("/dev/shm/torch_planted")
    segment.write_bytes(b"")
    (tmp_path / "pymp-planted").mkdir()
    try:
        new = sandbox.shared_memory() - before
        left = sandbox.left_behind("planted", session=-1, within_s=0)
    finally:
        segment.unlink()
    assert orphan.wait(10) == -9  # the judge has ended it
    orphan.stdout.close()
    wrong = judge.left_over(left, new, tmp_path)
    assert [text.partition(":")[0] for text in wrong] == ["orphan", "leaked in /dev/shm", "leaked in TMPDIR"]
    assert "time.sleep(60)" in wrong[0]
    assert sandbox.left_behind("planted", session=-1, within_s=0) == {}
