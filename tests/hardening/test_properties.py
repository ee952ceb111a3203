"""Properties of any input, which Hypothesis searches with a few examples, the same in each run.

LABKIT_EXAMPLES=2000 searches longer, with new examples in each run.
"""

import math
import os
import shutil
import tarfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st
from PIL import Image

import labkit as lk
from labkit.app.recording import file_stem
from labkit.course.oracles import oracle_files
from labkit.data.extract import safe_path
from labkit.data.shards_write import member_names, store_key
from labkit.data.sizes import parse_cache_name
from labkit.measure.frames import save_frame
from labkit.measure.statistics import quiet_summary
from labkit.util.strings import PackedStrings
from tests.hardening.fuzz.images import decoders, headers
from tests.hardening.fuzz.oracle import scratch
from tests.hardening.test_hostile import PNG
from tests.image_files import encoded
from tests.memory_store import MemoryStore
from tests.tars import make_tar, member

EXAMPLES = int(os.environ.get("LABKIT_EXAMPLES", "0"))
bounded = settings(
    max_examples=EXAMPLES or 40, derandomize=not EXAMPLES, database=None, deadline=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
fewer = settings(bounded, max_examples=EXAMPLES or 15)

# What a file's name may hold on Linux: all bytes but two, bytes that are no UTF-8 as Python spells them.
_characters = st.characters(exclude_categories=["Cs"], exclude_characters="/\0")
_not_utf8 = st.binary(min_size=1, max_size=12).map(lambda data: os.fsdecode(data.translate(None, b"/\0") + b"\xff"))
stems = (st.text(_characters, min_size=1, max_size=12) | _not_utf8).filter(lambda name: not name.startswith("."))
keys = st.builds("{}/{}{}".format, stems, stems, st.sampled_from([".jpg", ".png", ".PNG", ".webp"]))


@st.composite
def damaged_images(draw) -> bytes:
    """An image of `oracle_files` with bytes changed, removed or inserted; or any bytes."""
    data = bytearray(draw(st.sampled_from(list(oracle_files().values()))))
    for at, change in draw(st.lists(st.tuples(st.integers(0, 1 << 16), st.binary(max_size=4)), max_size=6)):
        data[at % len(data) : at % len(data) + draw(st.integers(0, 4))] = change
    return draw(st.sampled_from([bytes(data), bytes(data[: len(data) // 2]), draw(st.binary(max_size=64))]))


@pytest.mark.slow
@bounded
@given(damaged_images(), st.integers(0, 255))
def test_damaged_images(data, options):
    """An image or a DecodeError, in every decoder; a size as Pillow reads it."""
    decoders(bytes([options]) + data)
    headers(b"\0" + data)


@pytest.mark.slow
@bounded
@given(st.lists(st.text(max_size=20) | stems, max_size=20))
def test_packed_strings_are_the_strings(strings):
    packed = PackedStrings(strings)
    assert list(packed) == strings
    assert packed == strings
    assert PackedStrings.from_arrays(*packed.arrays()) == strings
    assert list(packed.encoded()) == [string.encode("utf-8", "surrogateescape") for string in strings]
    assert packed[-3:] == strings[-3:]


_times = st.integers(0, 1 << 40) | st.floats(0, 1e10)
_members = st.builds(
    member,
    stems | keys,
    st.binary(max_size=700),
    mode=st.integers(0, 0o7777),
    mtime=_times,
    uid=st.integers(0, 1 << 33),
)


@bounded
@given(st.lists(_members, max_size=6), st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
def test_a_tar_index_is_what_tarfile_reads(members, form):
    path = make_tar(scratch() / "x.tar", members, format=form)
    with tarfile.open(path) as tar:
        expected = {info.name: tar.extractfile(info).read() for info in tar}
    store = lk.TarStore(path)
    assert {name: store.read(name) for name in store.names()} == expected


@bounded
@given(st.sets(keys, max_size=12).map(sorted))
@example(["__x__/a.jpg", "a/B.JPG", "a/b%2E.jpg", "a/b.jpg", "a/b.jpg.jpg", "a/b.png"])
def test_each_key_has_a_name_of_its_own_in_shards(found):
    members = member_names(found)
    assert [store_key(member) for member in members] == found
    samples = {(folder, name.partition(".")[0]) for folder, _, name in (member.rpartition("/") for member in members)}
    assert len(samples) == len(found), "WebDataset would take two images for one sample"


@bounded
@given(stems, st.integers(1, 999_999_999), st.integers(1, 999_999_999))
def test_a_cache_name_states_its_size(stem, width, height):
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
def test_pixels_come_back(sizes):
    path = scratch() / "x.pixels"
    path.unlink(missing_ok=True)
    images = {key: Image.new("RGB", size, (*size, 7)) for key, size in sizes.items()}
    store = MemoryStore({key: encoded(image, "PNG") for key, image in images.items()})
    folder_of = {key: key.split("/")[0] if "/" in key else "" for key in sizes}
    options = {"decoder": "pil", "num_workers": 0, "progress": False, "classes": sorted(set(folder_of.values()))}
    built = lk.PixelStore.build(store, path, short_side=64, **options)
    assert list(built.keys) == sorted(sizes)
    for index, key in enumerate(built.keys):
        np.testing.assert_array_equal(built.pixels(index), np.asarray(images[key]))
        assert built.classes[built.labels[index]] == folder_of[key]
    built.verify(progress=False)


@settings(bounded, max_examples=EXAMPLES or 10)
@given(st.sets(keys, min_size=1, max_size=8), st.integers(1, 3), st.none() | st.integers(0, 9))
def test_shards_come_back(found, max_count, seed):
    root = scratch() / "shards"
    shutil.rmtree(root, ignore_errors=True)
    store = MemoryStore({key: PNG + os.fsencode(key) for key in found})
    options = {"max_count": max_count, "seed": seed, "engine": "threads", "num_workers": 0, "progress": False}
    dataset = lk.read_shards(lk.write_shards(store, root, **options))
    samples = list(dataset.samples())
    assert len(samples) == len(found)
    parts = {part for sample in samples for name, part in sample.items() if name not in ("__key__", "__url__", "cls")}
    assert parts == set(store.files.values())
    assert len(dataset.urls) == math.ceil(len(found) / max_count)


labels = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=8)
rates = st.floats(0.1, 1e5)
# Rates of a baseline and one or two other variants, in n rounds each.
measured = st.integers(1, 6).flatmap(
    lambda n: st.dictionaries(labels, st.lists(rates, min_size=n, max_size=n), min_size=2, max_size=3)
)
about_same = partial(np.testing.assert_allclose, rtol=1e-6, equal_nan=True)


@pytest.mark.slow
@bounded
@given(measured, labels, labels)
def test_a_frame_comes_back(frame_of, values, experiment, storage):
    frame = frame_of(values, next(iter(values)), experiment=experiment, storage=storage)
    again = lk.load_frame(save_frame(frame, scratch() / "frame.csv"))
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


@pytest.mark.slow
@fewer
@given(measured, st.floats(1e-3, 1e3), st.randoms(use_true_random=False))
def test_neither_a_faster_machine_nor_another_order_changes_speedups(frame_of, values, factor, random):
    frame = frame_of(values, next(iter(values)))
    rounds = sorted(frame["round"].unique())
    moved = frame.assign(round=frame["round"].map(dict(zip(rounds, random.sample(rounds, len(rounds)), strict=True))))
    ours = quiet_summary(frame)
    shuffled = quiet_summary(moved.sample(frac=1, random_state=random.randrange(99))).loc[ours.index]
    about_same(ours[["speedup", "images_per_s", "n_runs"]], shuffled[["speedup", "images_per_s", "n_runs"]])
    scaled = quiet_summary(frame.assign(images_per_s=frame["images_per_s"] * factor))
    about_same(ours[["speedup", "ci_low", "ci_high"]], scaled[["speedup", "ci_low", "ci_high"]])
    about_same(ours["images_per_s"] * factor, scaled["images_per_s"])


@fewer
@given(st.lists(st.tuples(rates, rates), min_size=1, max_size=6))
def test_the_other_baseline_inverts_the_speedup(frame_of, pairs):
    one, other = map(list, zip(*pairs, strict=True))
    frame = frame_of({"a": one, "b": other}, "a")
    there, back = quiet_summary(frame, "a").loc["b"], quiet_summary(frame, "b").loc["a"]
    about_same(there["speedup"], 1 / back["speedup"])
    about_same([there["ci_low"], there["ci_high"]], [1 / back["ci_high"], 1 / back["ci_low"]], rtol=0.05)
    assert {there["verdict"], back["verdict"]} in ({"inconclusive"}, {"faster", "slower"})


@pytest.mark.slow
@bounded
@given(measured)
def test_an_interval_holds_its_speedup_and_supports_its_verdict(frame_of, values):
    baseline, *others = values
    summary = quiet_summary(frame_of(values, baseline))
    assert summary.loc[baseline, "verdict"] == "baseline"
    for _, row in summary.loc[others].iterrows():
        if not math.isnan(row["ci_low"]):
            assert row["ci_low"] <= row["speedup"] * (1 + 1e-9)
            assert row["speedup"] <= row["ci_high"] * (1 + 1e-9)
        assert row["ci_low"] > 1 or row["ci_high"] < 1 or row["verdict"] == "inconclusive"
