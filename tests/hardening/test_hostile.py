"""Input that fuzzing or reading found to end in another error than the documented one; each failed before its mend."""

import os
import tarfile

import pytest

from labkit.app.recording import FolderRecorder
from labkit.data.depth import PRESETS, read_list
from labkit.data.shards_write import UNFINISHED, write_shards
from labkit.data.tar import TarStore
from labkit.errors import TarError
from labkit.measure.frames import load_frame, save_frame
from labkit.measure.statistics import quiet_summary
from tests.hardening.inputs import fix_tar, image_bytes
from tests.memory_store import MemoryStore

PNG = image_bytes((1, 1))
IMAGES = MemoryStore(dict.fromkeys(["a/x.png", "b/y.png"], PNG))


@pytest.mark.parametrize("text", [b"{", b"[" * 5000, b"[]", b"\xff"])
def test_damaged_notes_of_an_unfinished_run_are_named(tmp_path, text):
    root = tmp_path / "shards"
    os.makedirs(root / UNFINISHED)
    (root / UNFINISHED / "settings.json").write_bytes(text)
    with pytest.raises(ValueError, match=r"settings\.json is damaged.*another folder"):
        write_shards(MemoryStore({"a.png": PNG}), root, engine="threads", progress=False)


def test_a_header_that_tarfile_does_not_read_is_damage(tmp_path):
    """Its checksum is right and its mode is none: `tarfile` takes that for the end."""
    info = tarfile.TarInfo("a.jpg")
    bad = info.tobuf(tarfile.USTAR_FORMAT).replace(b"0000644", b"000x644")
    (tmp_path / "x.tar").write_bytes(info.tobuf() + fix_tar(bad) + bytes(1024))
    with pytest.raises(TarError, match=r"the header at byte 512 cannot be read: .*last whole member is 'a\.jpg'"):
        TarStore(tmp_path / "x.tar").names()


LARGEST = (2**31 - 1).to_bytes(4, "little")


@pytest.mark.parametrize("blank", ["\u2028", "\x85", "\x0b", "\x0c", "\x1e"])
def test_lines_of_a_list_end_where_python_ends_them(tmp_path, blank):
    (tmp_path / "list.txt").write_text(f"a.png b.png\nc.png{blank}d.png\n", encoding="utf-8")
    found = read_list(tmp_path / "list.txt", PRESETS["hypersim"])
    assert list(found.names["depth"]) == ["b.png", "d.png"]
    assert found.lines.tolist() == [1, 2]


ODD_LABELS = [
    "1", "None", "NA", "nan", "True", " a ", 'q"', ",", "a\nb", "a\rb", "a\r\nb", "e\u0301", "\xe9", "#", "\u2028",
]  # fmt: skip


def test_labels_of_a_frame_come_back_as_they_were(frame_of, tmp_path):
    frame = frame_of({label: [1.0, 2.0] for label in ODD_LABELS}, baseline="1", experiment="None")
    again = load_frame(save_frame(frame, tmp_path / "frame.csv"))
    assert list(again["variant"]) == list(frame["variant"])
    assert set(again["experiment"]) == {"None"}
    assert list(quiet_summary(again).index) == ODD_LABELS


@pytest.mark.parametrize(("column", "value"), [("images_per_s", "inf"), ("cpu_s", "1e999"), ("round", "first")])
def test_a_frame_of_what_was_never_measured_is_refused(frame_of, tmp_path, column, value):
    frame = frame_of({"a": [1.0, 2.0], "b": [3.0, 4.0]}, baseline="a").astype({column: object})
    frame.loc[1, column] = value
    save_frame(frame, tmp_path / "frame.csv")
    with pytest.raises(ValueError, match=rf"frame\.csv is not a frame of runs: {column} must hold finite numbers"):
        load_frame(tmp_path / "frame.csv")


def test_a_row_longer_than_the_header_is_no_shifted_frame(frame_of, tmp_path):
    save_frame(frame_of({"a": [1.0]}, baseline="a"), tmp_path / "frame.csv")
    head, row = (tmp_path / "frame.csv").read_text().splitlines()
    (tmp_path / "frame.csv").write_text(f"{head}\nextra,{row}\n")
    with pytest.raises(ValueError, match=r"frame\.csv is not a frame of runs"):
        load_frame(tmp_path / "frame.csv")


def test_no_two_experiments_share_a_file(frame_of, tmp_path):
    names = ["a b", "a_b", "a, b", "a/b", "\xe9", "\xfc", "x" * 300, "x" * 299, "../up", ".hidden", "-dash", ";$(id)"]
    for name in names:
        FolderRecorder(tmp_path).record_frame(frame_of({"a": [1.0]}, baseline="a", experiment=name))
    found = [load_frame(path)["experiment"][0] for path in tmp_path.glob("*.csv")]
    assert sorted(found) == sorted(names)
    assert (tmp_path / "a_b.csv").exists(), "plain names stay readable"
