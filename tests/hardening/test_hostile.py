"""Input that fuzzing or reading found to end in another error than the documented one; each failed before its mend."""

import io
import json
import os
import tarfile
import zipfile
import zlib

import numpy as np
import pytest

import labkit as lk
from labkit.core.limits import MAX_FILE_VARIABLE
from labkit.data.depth.presets import PRESETS, read_list
from labkit.data.pixels.store import PixelError, PixelStore
from labkit.data.shards.read import read_shards
from labkit.data.shards.write import UNFINISHED, write_shards
from labkit.data.tar.errors import TarError
from labkit.data.tar.index import SUFFIX
from labkit.data.tar.store import TarStore
from labkit.lab.recording import FolderRecorder
from labkit.measure.frames import load_frame, save_frame
from labkit.measure.summary import quiet_summary
from tests.memory_store import MemoryStore

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d494844520000000100000001080200000090"
    "7753de0000000c49444154789c63606060000000040001f6177f380000000049454e44ae426082"
)  # 1 x 1, RGB


@pytest.mark.parametrize("text", [b"{", b"[" * 5000, b"[]", b"\xff"])
def test_damaged_notes_of_an_unfinished_run_are_named(tmp_path, text):
    root = tmp_path / "shards"
    os.makedirs(root / UNFINISHED)
    (root / UNFINISHED / "settings.json").write_bytes(text)
    with pytest.raises(ValueError, match=r"settings\.json is damaged.*another folder"):
        write_shards(MemoryStore({"a.png": PNG}), root, engine="threads", progress=False)


@pytest.mark.parametrize("name", ["../up.tar", "", 7, None, "/etc/x.tar"])
def test_a_manifest_names_no_shard_outside_its_folder(tmp_path, name):
    root = write_shards(MemoryStore({"a.png": PNG}), tmp_path / "shards", engine="threads", progress=False)
    content = json.loads((root / "manifest.json").read_bytes())
    content["shards"][0]["name"] = name
    (root / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"manifest\.json is not a manifest"):
        read_shards(root)


def sparse_tar(path, real_size: int, pieces: str = "0\n1\n"):
    """A tar whose only image has one byte and says that it has `real_size`."""
    info = tarfile.TarInfo("GNUSparseFile.0/s.jpg")
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(real_size)}
    data = f"1\n{pieces}".encode().ljust(512, b"\0") + b"x"
    info.size = len(data)
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(info, io.BytesIO(data))
    return path


@pytest.mark.parametrize("mode", ["index", "tarfile", "reopen"])
def test_holes_are_unfolded_up_to_a_limit(tmp_path, mode):
    [name] = TarStore(sparse_tar(tmp_path / "small.tar", 9), mode).keys()
    assert TarStore(tmp_path / "small.tar", mode).read(name) == b"x" + bytes(8)
    store = TarStore(sparse_tar(tmp_path / "bomb.tar", 1 << 50), mode)
    with pytest.raises(TarError, match=rf"bomb\.tar: '.*s\.jpg' has {1 << 50} bytes"):
        store.read(name)


@pytest.mark.parametrize("mode", ["index", "tarfile", "reopen"])
@pytest.mark.parametrize(
    ("size", "pieces"), [(9, "10\n1\n"), (9, "-1\n1\n"), (9, "0\n-1\n"), (-1, "0\n1\n"), (1 << 63, "0\n1\n")]
)
def test_impossible_pieces_are_damage(tmp_path, mode, size, pieces):
    path = sparse_tar(tmp_path / "bad.tar", size, pieces)
    said = r"bad\.tar is (cut or damaged|not a tar).*s\.jpg' (has a piece|says that it has|has a size below zero)"
    with pytest.raises(TarError, match=said):
        TarStore(path, mode).names()


def stored_index(tar, **changed):
    """The index file beside a tar, with some of its arrays changed."""
    TarStore(tar).names()
    path = tar.with_name(tar.name + SUFFIX)
    with np.load(path) as stored:
        arrays = {name: stored[name] for name in stored} | changed
    return path, arrays


@pytest.mark.parametrize(
    "changed",
    [
        {"offsets": np.array([1 << 62])}, {"offsets": np.array([-2])}, {"sizes": np.array([-1])},
        {"sizes": np.array([1 << 62])}, {"offsets": np.array([[512]])}, {"sizes": np.array([1.0])},
    ],
)  # fmt: skip
def test_an_index_that_leads_out_of_its_tar_is_built_again(tmp_path, changed):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        info = tarfile.TarInfo("a.jpg")
        info.size = 3
        tar.addfile(info, io.BytesIO(b"123"))
    path, arrays = stored_index(tmp_path / "x.tar", **changed)
    np.savez(path, **arrays)
    assert TarStore(tmp_path / "x.tar").read("a.jpg") == b"123"


def test_a_compressed_index_is_built_again(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("a.jpg"))
    path, arrays = stored_index(tmp_path / "x.tar", block=np.zeros(1 << 20, np.uint8))
    np.savez_compressed(path, **arrays)
    assert TarStore(tmp_path / "x.tar").names() == ["a.jpg"]
    assert path.stat().st_size > 1000, "it was not written anew"
    with zipfile.ZipFile(path) as stored:
        assert not any(part.compress_type for part in stored.infolist())


def test_a_header_that_tarfile_does_not_read_is_damage(tmp_path):
    """Its checksum is right and its mode is none: `tarfile` takes that for the end."""
    info = tarfile.TarInfo("a.jpg")
    header = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    header[100:108] = b"000x644\0"
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    (tmp_path / "x.tar").write_bytes(bytes(info.tobuf()) + bytes(header) + bytes(1024))
    with pytest.raises(TarError, match=r"the header at byte 512 cannot be read: .*last whole member is 'a\.jpg'"):
        TarStore(tmp_path / "x.tar").names()


def shard(path, *members: tuple[str, bytes], compression: str = ""):
    with tarfile.open(path, f"w:{compression}", format=tarfile.PAX_FORMAT) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return str(path)


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([("x.__bad__", b"1"), ("x.cls", b"0"), ("x.png", PNG)], r"x\.tar: 'x\.__bad__' has a suffix that WebDataset"),
        ([("v1.0\n/x.png", PNG)], r"x\.tar: 'v1\.0\\n/x\.png' names no sample"),
        ([("x.cls", b"9" * 30), ("x.png", PNG)], r"x\.tar: its label must be a 64-bit integer, got b'9{20}'"),
    ],
)
def test_no_sample_of_a_shard_is_passed_over(tmp_path, members, said):
    with pytest.raises(ValueError, match=said):
        list(read_shards(shard(tmp_path / "x.tar", *members), decoder="pil"))


def test_a_bomb_in_a_shard_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv(MAX_FILE_VARIABLE, "0.001")
    path = shard(tmp_path / "x.tar.gz", ("a.txt", b"1"), ("x.png", bytes(1001)), compression="gz")
    with pytest.raises(TarError, match=r"x\.tar\.gz.*'x\.png' has 1001 bytes"):
        list(read_shards(path, decoder="pil"))


def pixel_file(path, *, header=None, index=None):
    """A sound pixel file with bytes of its header and index changed, and all checksums made right."""
    PixelStore.build(MemoryStore(dict.fromkeys(["a/x.png", "b/y.png"], PNG)), path, num_workers=0, progress=False)
    head, rest = bytearray(path.read_bytes()[:128]), bytearray(path.read_bytes()[128:])
    for at, data in (index or {}).items():
        rest[at : at + len(data)] = data
    head[40:44] = zlib.crc32(rest[: int.from_bytes(head[24:32], "little")]).to_bytes(4, "little")
    for at, data in (header or {}).items():
        head[at : at + len(data)] = data
    head[124:128] = zlib.crc32(head[:124]).to_bytes(4, "little")
    path.write_bytes(bytes(head + rest))
    return path


LARGEST = (2**31 - 1).to_bytes(4, "little")


@pytest.mark.parametrize(
    "changed",
    [
        {"header": {16: b"\xff" * 8}},  # images
        {"header": {24: b"\xff" * 8}},  # bytes of the index
        {"header": {24: b"\0" * 7 + b"\x40"}},
        {"index": {40: 4 * LARGEST}},  # heights and widths, whose product is no int64
        {"index": {40: (0xAAAAAAAB).to_bytes(8, "little")}},
        {"index": {0: bytes(8)}},  # an image in the header
        {"index": {8: (192).to_bytes(8, "little")}},  # in another one's place
        {"index": {24: b"\xff" * 8}},  # keys
    ],
)
def test_a_forged_pixel_file_is_damaged(tmp_path, changed):
    with pytest.raises(PixelError, match=r"x\.pixels is damaged: "):
        PixelStore(pixel_file(tmp_path / "x.pixels", **changed))


def test_a_decoder_of_another_alphabet_is_another_decoder(tmp_path):
    path = pixel_file(tmp_path / "x.pixels", header={76: b"\xff\xfe"})
    with pytest.raises(PixelError, match="holds other pixels"):
        PixelStore.build(MemoryStore(dict.fromkeys(["a/x.png", "b/y.png"], PNG)), path, num_workers=0, progress=False)


@pytest.mark.parametrize("blank", ["\u2028", "\x85", "\x0b", "\x0c", "\x1e"])
def test_lines_of_a_list_end_where_python_ends_them(tmp_path, blank):
    (tmp_path / "list.txt").write_text(f"a.png b.png\nc.png{blank}d.png\n", encoding="utf-8")
    found = read_list(tmp_path / "list.txt", PRESETS["hypersim"])
    assert list(found.names["depth"]) == ["b.png", "d.png"]
    assert found.lines.tolist() == [1, 2]


ODD_LABELS = [
    "1",
    "None",
    "NA",
    "nan",
    "True",
    " a ",
    'q"',
    ",",
    "a\nb",
    "a\rb",
    "a\r\nb",
    "e\u0301",
    "\xe9",
    "#",
    "\u2028",
]


def test_labels_of_a_frame_come_back_as_they_were(frame_of, tmp_path):
    frame = frame_of({label: [1.0, 2.0] for label in ODD_LABELS}, baseline="1", experiment="None")
    again = load_frame(save_frame(frame, tmp_path / "frame.csv"))
    assert list(again["variant"]) == list(frame["variant"])
    assert set(again["experiment"]) == {"None"}
    assert list(quiet_summary(again).index) == ODD_LABELS


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("images_per_s", "fast", "images_per_s must hold finite numbers"),
        ("images_per_s", "0", "images_per_s must hold numbers > 0"),
        ("images_per_s", "", "images_per_s must hold numbers > 0"),
        ("images_per_s", "inf", "images_per_s must hold finite numbers"),
        ("cpu_s", "1e999", "cpu_s must hold finite numbers"),
        ("round", "first", "round must hold finite numbers"),
        ("is_warmup", "maybe", "is_warmup must hold True or False"),
    ],
)
def test_a_frame_of_what_was_never_measured_is_refused(frame_of, tmp_path, column, value, said):
    frame = frame_of({"a": [1.0, 2.0], "b": [3.0, 4.0]}, baseline="a").astype({column: object})
    frame.loc[1, column] = value
    save_frame(frame, tmp_path / "frame.csv")
    with pytest.raises(ValueError, match=rf"frame\.csv is not a frame of runs: {said}"):
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


@pytest.mark.parametrize("name", ["\udcff", "a\0b"])
@pytest.mark.parametrize("part", ["variant", "experiment"])
def test_names_that_no_table_holds_are_refused_before_anything_is_measured(name, part):
    label, experiment = (name, "") if part == "variant" else ("a", name)
    with pytest.raises(ValueError, match="cannot be saved in a table"):
        lk.compare({label: pytest.fail}, baseline=label, experiment=experiment, progress=False)
