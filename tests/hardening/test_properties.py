"""Properties of any input, searched by Hypothesis with a few examples, the same in each run.

LABKIT_EXAMPLES=2000 searches longer, with new examples in each run.
"""

import io
import math
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st
from PIL import Image

import labkit as lk
from labkit.core.strings import PackedStrings
from labkit.data import decoders as decoding
from labkit.data.decoders import DECODERS, DecodeError, decode, missing_decoders
from labkit.data.extract.plan import safe_path
from labkit.data.shards.layout import member_names, store_key
from labkit.data.sizes.latent_caches import parse_cache_name
from labkit.lab.recording import file_stem
from labkit.measure.frames import load_frame, make_frame, save_frame
from labkit.measure.summary import quiet_summary
from labkit.teach.conformance import oracle_files
from tests.hardening.fuzz.images import headers
from tests.hardening.fuzz.oracle import scratch
from tests.memory_store import MemoryStore

EXAMPLES = int(os.environ.get("LABKIT_EXAMPLES", "0"))
bounded = settings(
    max_examples=EXAMPLES or 40, derandomize=not EXAMPLES, database=None, deadline=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip

# What a file's name may hold on Linux: any bytes but two, broken UTF-8 as Python spells it.
_letters = st.characters(exclude_categories=["Cs"], exclude_characters="/\0")
broken = st.binary(min_size=1, max_size=12).map(lambda data: os.fsdecode(data.translate(None, b"/\0") + b"\xff"))
stems = (st.text(_letters, min_size=1, max_size=12) | broken).filter(lambda name: not name.startswith("."))
keys = st.builds("{}/{}{}".format, stems, stems, st.sampled_from([".jpg", ".png", ".PNG", ".webp"]))
labels = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=8)
rates = st.floats(0.1, 1e5)


def png(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (width % 256, height % 256, 7)).save(buffer, "PNG")
    return buffer.getvalue()


@st.composite
def damaged_images(draw) -> bytes:
    """An oracle image with bytes changed, left out or put in; or any bytes."""
    data = bytearray(oracle_files()[draw(st.sampled_from(sorted(oracle_files())))])
    for at, change in draw(st.lists(st.tuples(st.integers(0, 1 << 16), st.binary(max_size=4)), max_size=6)):
        data[at % len(data) : at % len(data) + draw(st.integers(0, 4))] = change
    return draw(st.sampled_from([bytes(data), bytes(data[: len(data) // 2]), draw(st.binary(max_size=64))]))


@bounded
@given(damaged_images(), st.sampled_from(DECODERS), st.none() | st.integers(1, 100))
def test_any_bytes_are_an_image_or_a_decode_error(data, decoder, short_side):
    if decoder in missing_decoders():
        return
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decoding, "MAX_PIXELS", 1 << 20)  # so that no example takes a second
            image = decode(data, decoder, key="a\nb.jpg", short_side=short_side)
    except DecodeError as error:
        image, said = None, str(error)
    if image is None:
        assert said.startswith("a\nb.jpg: ")
        return
    assert image.dtype == decoding.torch.uint8
    assert image.shape[0] == 3
    assert image.ndim == 3


@bounded
@given(damaged_images())
def test_a_header_is_what_pillow_reads(data):
    headers(b"\0" + data)


@bounded
@given(st.lists(st.text(max_size=20) | stems, max_size=20))
def test_packed_strings_are_the_strings(strings):
    packed = PackedStrings(strings)
    assert list(packed) == strings
    assert packed == strings
    assert PackedStrings.from_arrays(*packed.arrays()) == strings
    assert list(packed.encoded()) == [string.encode("utf-8", "surrogateescape") for string in strings]
    assert packed[-3:] == strings[-3:]


@bounded
@given(st.lists(st.tuples(stems | keys, st.binary(max_size=700)), max_size=6), st.booleans(), st.data())
def test_a_tar_index_is_what_tarfile_reads(members, gnu, data):
    path = scratch() / "x.tar"
    form = tarfile.GNU_FORMAT if gnu else tarfile.PAX_FORMAT
    with tarfile.open(path, "w", format=form, encoding="utf-8", errors="surrogateescape") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), data.draw(st.integers(0, 0o7777))
            info.mtime = data.draw(st.integers(0, 1 << 40) | st.floats(0, 1e10))
            info.uid = data.draw(st.integers(0, 1 << 33))
            tar.addfile(info, io.BytesIO(content))
    store = lk.TarStore(path)
    with tarfile.open(path, encoding="utf-8", errors="surrogateescape") as tar:
        expected = {info.name: tar.extractfile(info).read() for info in tar}
    assert {name: store.read(name) for name in store.names()} == expected


@bounded
@given(st.sets(keys, max_size=12))
@example({"a/b.jpg", "a/b.png", "a/b.jpg.jpg", "a/b%2E.jpg", "__x__/a.jpg", "a/B.JPG"})
def test_shards_have_a_name_for_each_key_that_gives_it_back(found):
    found = sorted(found)
    members = member_names(found)
    assert [store_key(member) for member in members] == found
    stems_of = [member.rpartition("/")[0] + "/" + member.rpartition("/")[2].partition(".")[0] for member in members]
    assert len(set(stems_of)) == len(found), "WebDataset would take two images for one sample"


@bounded
@given(stems, st.integers(1, 999_999_999), st.integers(1, 999_999_999))
def test_a_cache_name_gives_its_size_back(stem, width, height):
    assert parse_cache_name(f"{stem}_{width:04d}x{height:04d}_sdxl.npz") == (stem, width, height)


@bounded
@given(st.lists(st.sampled_from(["a", "..", ".", "", " ", "\0", "..."]) | stems, max_size=6).map("/".join))
def test_a_safe_path_stays_below_its_folder(name):
    try:
        path = safe_path(name)
    except ValueError:
        return
    at = os.path.normpath(os.path.join("/top/folder", path))
    assert at == "/top/folder" or at.startswith("/top/folder/")
    assert path == "" or path == os.path.normpath(path)


@settings(bounded, max_examples=EXAMPLES or 10)
@given(st.dictionaries(keys, st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=5))
def test_pixels_come_back(shapes):
    path = scratch() / "x.pixels"
    path.unlink(missing_ok=True)
    store = MemoryStore({key: png(*shape) for key, shape in shapes.items()})
    built = lk.PixelStore.build(store, path, short_side=64, decoder="pil", num_workers=0, progress=False)
    assert list(built.keys) == sorted(shapes)
    for index, key in enumerate(built.keys):
        np.testing.assert_array_equal(built.pixels(index), np.asarray(Image.open(io.BytesIO(store.read(key)))))
        assert built.classes[built.labels[index]] == key.rpartition("/")[0]
    built.verify(progress=False)


@settings(bounded, max_examples=EXAMPLES or 10)
@given(st.sets(keys, min_size=1, max_size=8), st.integers(1, 3), st.none() | st.integers(0, 9))
def test_shards_come_back(found, max_count, seed):
    import shutil

    root = scratch() / "shards"
    shutil.rmtree(root, ignore_errors=True)
    store = MemoryStore({key: png(1, 1) + os.fsencode(key) for key in found})
    options = {"max_count": max_count, "seed": seed, "engine": "threads", "num_workers": 0, "progress": False}
    dataset = lk.read_shards(lk.write_shards(store, root, **options))
    given_back = list(dataset.samples())
    assert len(given_back) == len(found)
    images = {
        part for sample in given_back for name, part in sample.items() if name not in ("__key__", "__url__", "cls")
    }
    assert images == set(store.files.values())
    assert len(dataset.urls) == math.ceil(len(found) / max_count)


def frame_of(values: dict[str, list[float]], baseline: str, **about):
    rows = [
        {"variant": label, "round": number, "order": order, "is_warmup": False, "n_images": 100, "images_per_s": rate,
         "cpu_s": 1.0, "peak_mem_mb": 1.0, "steady_s": 100 / rate}
        for order, (label, column) in enumerate(values.items()) for number, rate in enumerate(column)
    ]  # fmt: skip
    return make_frame(
        rows, baseline=baseline, env_id="machine", device="cpu", scale="ci", **{"experiment": "p", **about}
    )


@st.composite
def frames(draw):
    """A baseline and one or two others, over the same rounds."""
    names = draw(st.lists(labels, min_size=2, max_size=3, unique=True))
    n_rounds = draw(st.integers(1, 6))
    values = {name: draw(st.lists(rates, min_size=n_rounds, max_size=n_rounds)) for name in names}
    return frame_of(values, names[0], experiment=draw(labels), storage=draw(labels))


@bounded
@given(frames())
def test_a_frame_comes_back(frame):
    again = load_frame(save_frame(frame, scratch() / "frame.csv"))
    for name in ("variant", "experiment", "baseline", "storage"):
        assert list(again[name]) == list(frame[name])
    np.testing.assert_allclose(again["images_per_s"], frame["images_per_s"], rtol=1e-15)
    assert list(quiet_summary(again)["verdict"]) == list(quiet_summary(frame)["verdict"])


@bounded
@given(st.text(min_size=1, max_size=40), st.text(min_size=1, max_size=40))
def test_file_stems_are_names_of_their_own(one, other):
    stem = file_stem(one)
    assert 0 < len(os.fsencode(stem)) < 200
    assert Path(stem).name == stem
    assert not stem.startswith(".")
    assert (stem == file_stem(other)) == (one == other)


_same = {"rtol": 1e-6, "equal_nan": True}


@settings(bounded, max_examples=EXAMPLES or 15)
@given(frames(), st.floats(1e-3, 1e3))
def test_a_faster_machine_changes_no_speedup(frame, factor):
    scaled = frame.assign(images_per_s=frame["images_per_s"] * factor)
    ours, theirs = quiet_summary(frame), quiet_summary(scaled)
    for column in ("speedup", "ci_low", "ci_high"):
        np.testing.assert_allclose(ours[column], theirs[column], **_same)
    np.testing.assert_allclose(ours["images_per_s"] * factor, theirs["images_per_s"], **_same)


@settings(bounded, max_examples=EXAMPLES or 15)
@given(st.lists(st.tuples(rates, rates), min_size=1, max_size=6))
def test_the_other_baseline_turns_the_speedup_over(pairs):
    frame = frame_of({"a": [one for one, _ in pairs], "b": [other for _, other in pairs]}, "a")
    there, back = quiet_summary(frame, "a").loc["b"], quiet_summary(frame, "b").loc["a"]
    np.testing.assert_allclose(there["speedup"], 1 / back["speedup"], **_same)
    np.testing.assert_allclose(
        [there["ci_low"], there["ci_high"]], [1 / back["ci_high"], 1 / back["ci_low"]], rtol=0.05
    )
    assert {there["verdict"], back["verdict"]} in ({"inconclusive"}, {"faster", "slower"})


@settings(bounded, max_examples=EXAMPLES or 15)
@given(frames(), st.randoms(use_true_random=False))
def test_the_order_of_rows_and_rounds_says_nothing(frame, random):
    rounds = sorted(frame["round"].unique())
    moved = dict(zip(rounds, random.sample(rounds, len(rounds)), strict=True))
    shuffled = frame.assign(round=frame["round"].map(moved)).sample(frac=1, random_state=random.randrange(99))
    ours, theirs = quiet_summary(frame), quiet_summary(shuffled).loc[quiet_summary(frame).index]
    np.testing.assert_allclose(ours["speedup"], theirs["speedup"], **_same)
    np.testing.assert_allclose(ours["images_per_s"], theirs["images_per_s"], **_same)
    assert (ours["n_runs"] == theirs["n_runs"]).all()


@bounded
@given(frames())
def test_an_interval_holds_its_speedup_and_its_verdict(frame):
    for label, row in quiet_summary(frame).iterrows():
        if row["verdict"] == "baseline":
            assert label == frame["baseline"].iloc[0]
            continue
        if not math.isnan(row["ci_low"]):
            assert row["ci_low"] <= row["speedup"] * (1 + 1e-9)
            assert row["speedup"] <= row["ci_high"] * (1 + 1e-9)
        sure = row["ci_low"] > 1 or row["ci_high"] < 1
        assert sure or row["verdict"] == "inconclusive"
