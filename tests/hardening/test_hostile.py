"""Input that fuzzing or reading found to end in another error than the documented one; each failed before its mend."""

import os
import tarfile

import pytest

from labkit.app.recording import FolderRecorder
from labkit.data.depth import PRESETS, read_list
from labkit.data.pixels import PixelStore
from labkit.data.shards_write import UNFINISHED, write_shards
from labkit.data.tar import TarStore
from labkit.errors import PixelError, TarError
from labkit.measure.frames import load_frame, save_frame
from labkit.measure.statistics import quiet_summary
from tests.hardening.inputs import fix_pixel_file, fix_tar, image_bytes, sparse_member
from tests.memory_store import MemoryStore
from tests.tars import make_tar

PNG = image_bytes((1, 1))
IMAGES = MemoryStore(dict.fromkeys(["a/x.png", "b/y.png"], PNG))


@pytest.mark.parametrize("text", [b"{", b"[" * 5000, b"[]", b"\xff"])
def test_damaged_notes_of_an_unfinished_run_are_named(tmp_path, text):
    root = tmp_path / "shards"
    os.makedirs(root / UNFINISHED)
    (root / UNFINISHED / "settings.json").write_bytes(text)
    with pytest.raises(ValueError, match=r"settings\.json is damaged.*another folder"):
        write_shards(MemoryStore({"a.png": PNG}), root, engine="threads", progress=False)


@pytest.mark.parametrize("mode", ["index", "tarfile", "reopen"])
@pytest.mark.parametrize(("size", "start", "length"), [(9, 10, 1), (9, -1, 1), (9, 0, -1), (-1, 0, 1), (1 << 63, 0, 1)])
def test_impossible_pieces_are_damage(tmp_path, mode, size, start, length):
    path = make_tar(tmp_path / "bad.tar", [sparse_member("s.jpg", size, start, length, b"x")])
    said = r"bad\.tar is (cut or damaged|not a tar).*s\.jpg' (has a piece|says that it has|has a size below zero)"
    with pytest.raises(TarError, match=said):
        TarStore(path, mode).names()


def test_a_header_that_tarfile_does_not_read_is_damage(tmp_path):
    """Its checksum is right and its mode is none: `tarfile` takes that for the end."""
    info = tarfile.TarInfo("a.jpg")
    bad = info.tobuf(tarfile.USTAR_FORMAT).replace(b"0000644", b"000x644")
    (tmp_path / "x.tar").write_bytes(info.tobuf() + fix_tar(bad) + bytes(1024))
    with pytest.raises(TarError, match=r"the header at byte 512 cannot be read: .*last whole member is 'a\.jpg'"):
        TarStore(tmp_path / "x.tar").names()


def pixel_file(path, changes):
    """A pixel file with the bytes at some offsets changed (the index starts at 128), and all checksums made right."""
    data = bytearray(PixelStore.build(IMAGES, path, num_workers=0, progress=False).path.read_bytes())
    for at, new in changes.items():
        data[at : at + len(new)] = new
    path.write_bytes(fix_pixel_file(bytes(data)))
    return path


LARGEST = (2**31 - 1).to_bytes(4, "little")


@pytest.mark.parametrize(
    "changes",
    [
        {16: b"\xff" * 8},  # images
        {24: b"\xff" * 8},  # bytes of the index
        {24: b"\0" * 7 + b"\x40"},
        {128 + 40: 4 * LARGEST},  # heights and widths, whose product is no int64
        {128 + 40: (0xAAAAAAAB).to_bytes(8, "little")},
        {128: bytes(8)},  # an image in the header
        {128 + 8: (192).to_bytes(8, "little")},  # in another one's place
        {128 + 24: b"\xff" * 8},  # keys
    ],
)
def test_a_forged_pixel_file_is_damaged(tmp_path, changes):
    with pytest.raises(PixelError, match=r"x\.pixels is damaged: "):
        PixelStore(pixel_file(tmp_path / "x.pixels", changes))


def test_a_decoder_of_another_alphabet_is_another_decoder(tmp_path):
    path = pixel_file(tmp_path / "x.pixels", {76: b"\xff\xfe"})
    with pytest.raises(PixelError, match="holds other pixels"):
        PixelStore.build(IMAGES, path, num_workers=0, progress=False)


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
