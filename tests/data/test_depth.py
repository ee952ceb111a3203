"""lk.DepthPairs: Marigold's pairs, compared with its steps written out plainly, over every kind of store."""

import random
import tarfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from PIL import Image

from labkit import DecodeError, DepthPairs, FolderStore, TarStore
from labkit.data import depth as depth_module
from labkit.data.depth import PRESETS, fast_sample, plain_sample
from labkit.errors import LabkitError
from tests.fresh import fresh_copy
from tests.image_files import encoded
from tests.memory_store import MemoryStore

# What the sets are, stated here once more: stored integers a metre, limits, size (height, width), files of a pair.
SETS = {
    "hypersim": (1000, 1e-5, 65, (96, 128), ("rgb.png", "depth.png")),
    "vkitti": (100, 1e-5, 80, (375, 1242), ("rgb.jpg", "depth.png")),
    "nyu": (1000, 1e-3, 10, (480, 640), ("rgb.png", "depth.png", "filled.png")),
    "kitti": (256, 1e-5, 80, (370, 1226), ("rgb.png", "depth.png")),
}
MASKS = {
    "nyu": {"train": "nyu", "evaluate": "nyu"}, "kitti": {"train": "eigen", "evaluate": "eigen"},
    "vkitti": {"evaluate": "eigen"},
}  # fmt: skip


def drawn_depth(rng, size, per_metre) -> np.ndarray:
    """Slopes and steps with holes, and every value at which validity could go wrong."""
    rows, columns = np.mgrid[: size[0], : size[1]]
    metres = 1 + 4 * rows / size[0] + 3 * (columns > size[1] // 3) + rng.normal(0, 0.2, size)
    stored = np.clip(metres * per_metre, 0, 65535).astype(np.uint16)
    stored[rng.random(size) < 0.1] = 0
    edges = [0, 1, 2, *(limit * per_metre + step for limit in (10, 65, 80) for step in (-1, 0, 1)), 65535]
    edges = [value for value in edges if value <= 65535]
    stored[size[0] // 2 : size[0] // 2 + len(edges), size[1] // 2] = edges
    return stored


def drawn_files(preset, number) -> dict[str, Image.Image]:
    per_metre, _, _, size, files = SETS[preset]
    rng = np.random.default_rng(number)
    pictures = {file: Image.fromarray(drawn_depth(rng, size, per_metre)) for file in files[1:]}
    smooth = rng.integers(0, 256, (8, 10, 3), dtype=np.uint8)
    return {files[0]: Image.fromarray(smooth).resize(size[::-1], Image.Resampling.BICUBIC), **pictures}


def write_set(folder: Path, preset: str) -> Path:
    """Pairs in `folder/data`, a tar whose names begin with `./`, and the list, which is returned."""
    lines = []
    for number in range(2):
        names = [f"scene_{preset}/{number}_{file}" for file in SETS[preset][4]]
        for name, picture in zip(names, drawn_files(preset, number).values(), strict=True):
            (folder / "data" / name).parent.mkdir(parents=True, exist_ok=True)
            picture.save(folder / "data" / name, compress_level=1)
        lines.append(" ".join(names))
    if preset == "kitti":
        lines = [f"{line} 721.5377" for line in (lines[0], f"{names[0]} None", lines[1])]
    with tarfile.open(folder / "data.tar", "w") as tar:
        tar.add(folder / "data", arcname=".")
    (folder / "list.txt").write_text("\n".join(lines))  # Marigold's own lists end without a line break
    return folder / "list.txt"


@pytest.fixture(scope="module")
def sets(tmp_path_factory) -> dict[str, Path]:
    """preset -> its list file, beside `data` and `data.tar`."""
    return {preset: write_set(tmp_path_factory.mktemp(preset), preset) for preset in SETS}


def pairs_of(sets: dict[str, Path], preset: str = "hypersim", **options) -> DepthPairs:
    return DepthPairs(FolderStore(sets[preset].parent / "data"), sets[preset], preset=preset, **options)


def nearest(length: int, new_length: int) -> list[int]:
    """nearest-exact: the pixel in which the middle of the new pixel lies."""
    return [(2 * position + 1) * length // (2 * new_length) for position in range(new_length)]


def in_region(region: str | None, height: int, width: int) -> np.ndarray:
    top, bottom, left, right = {
        None: (0, 1, 0, 1), "nyu": (45 / 480, 471 / 480, 41 / 640, 601 / 640),
        "eigen": (0.3324324, 0.91351351, 0.0359477, 0.96405229),
        "garg": (0.40810811, 0.99189189, 0.03594771, 0.96405229),
    }[region]  # fmt: skip
    inside = np.zeros((height, width), bool)
    inside[int(top * height) : int(bottom * height), int(left * width) : int(right * width)] = True
    return inside


def normalised(depth: np.ndarray, valid: np.ndarray, kind: str) -> np.ndarray:
    """Depth scaled from its quantiles, which torch computes, as there; invalid pixels of the filled one are far."""
    near, far = torch.quantile(torch.from_numpy(depth[valid]), torch.tensor([0.02, 0.98])).numpy()
    norm = np.clip((depth - near) / (far - near) * np.float32(2) - np.float32(1), -1, 1)
    return np.where(valid, norm, 1) if kind == "filled" else norm


@cache
def stored_rasters(folder: Path, names: tuple[str, ...], preset: str, mode: str) -> dict[str, np.ndarray]:
    """Marigold's steps from the description, in NumPy: those before a picture is mirrored and resized."""
    per_metre, least, most, _, _ = SETS[preset]
    pictures = [np.array(Image.open(folder / name)) for name in names]
    if "kitti" in preset:
        left = (pictures[0].shape[1] - 1216) // 2
        pictures = [picture[-352:, left : left + 1216] for picture in pictures]
    rgb = pictures[0].transpose(2, 0, 1)
    result = {"rgb_int": rgb.astype(np.int32), "rgb_norm": (rgb / 255 * 2 - 1).astype(np.float32)}
    inside = in_region(MASKS.get(preset, {}).get(mode), *rgb.shape[1:])
    for kind, picture in (("raw", pictures[1]), ("filled", pictures[-1])):
        depth = (picture / per_metre).astype(np.float32)
        valid = (depth > np.float32(least)) & (depth < np.float32(most)) & inside
        result |= {f"depth_{kind}_linear": depth[None], f"valid_mask_{kind}": valid[None]}
        if mode == "train":
            result[f"depth_{kind}_norm"] = normalised(depth, valid, kind)[None]
    return result


def oracle(folder: Path, names: tuple[str, ...], preset: str, mode: str, flipped: bool) -> dict[str, np.ndarray]:
    result = stored_rasters(folder, names, preset, mode)
    result = {name: raster[..., :: -1 if flipped else 1] for name, raster in result.items()}
    if mode == "evaluate" or preset != "hypersim":
        return result
    _, height, width = result["rgb_int"].shape
    rows, columns = nearest(height, 480), nearest(width, 640)
    return {name: raster[:, rows][:, :, columns] for name, raster in result.items()}


def assert_equal(found: dict, expected: dict) -> None:
    """Same keys, types and bits."""
    assert set(found) == set(expected)
    for name, value in expected.items():
        if isinstance(value, np.ndarray | torch.Tensor):
            array, wanted = np.asarray(found[name]), np.asarray(value)
            assert (array.dtype, array.shape) == (wanted.dtype, wanted.shape), name
            assert np.array_equal(array, wanted), f"{name}: {(array != wanted).sum()} values differ"
        else:
            assert found[name] == value, name


@pytest.mark.exhaustive
@pytest.mark.parametrize(("preset", "mode"), [(preset, mode) for preset in SETS for mode in ("train", "evaluate")])
def test_every_key_is_marigolds_plain_and_fast(sets, preset, mode):
    """And `random.random()` is called once a pair, as there."""
    lines = [line.split() for line in sets[preset].read_text().splitlines() if "None" not in line]
    turns = set()
    for fast in (False, True):
        pairs, draws = pairs_of(sets, preset, mode=mode, fast=fast), random.Random(1)
        assert len(pairs) == len(lines) == 2
        random.seed(1)
        for index in (0, 1, 1) if mode == "train" else (0, 1):
            flipped = mode == "train" and draws.random() < 0.5
            names = tuple(lines[index][: len(SETS[preset][4])])
            rasters = oracle(sets[preset].parent / "data", names, preset, mode, flipped)
            assert_equal(pairs[index], {**rasters, "index": index, "rgb_relative_path": names[0]})
            turns.add(flipped)
    assert turns == ({True, False} if mode == "train" else {False})


def test_evaluation_draws_nothing_and_training_mirrors_its_share(sets):
    random.seed(0)
    before = random.getstate()
    stored = pairs_of(sets, mode="evaluate")[0]["rgb_int"]
    assert random.getstate() == before
    for flip_p, column in ((0, 0), (1, -1)):
        for _ in range(4):
            found = pairs_of(sets, flip_p=flip_p)[0]["rgb_int"]  # 5 times as large
            assert torch.equal(found[:, ::5, 0], stored[:, :, column])


PICTURES = {name.partition(".")[0]: np.asarray(picture) for name, picture in drawn_files("hypersim", 5).items()}


@settings(max_examples=25, deadline=None)
@given(
    st.none() | st.tuples(st.integers(1, 480), st.integers(1, 640)), st.sampled_from([None, "garg", "eigen"]),
    st.booleans(), st.booleans(),
)  # fmt: skip
@example((480, 640), "garg", True, True)
@example((96, 128), None, True, True)
def test_fast_is_plain_bit_for_bit(size, region, flipped, train):
    preset = replace(PRESETS["hypersim"], train_size=size, train_mask=region, eval_mask=region)
    plain = plain_sample(PICTURES, preset, train=train, flipped=flipped and train)
    assert_equal(fast_sample(PICTURES, preset, train=train, flipped=flipped and train), plain)
    if not train:
        assert plain["valid_mask_raw"][0].numpy()[~in_region(region, 96, 128)].sum() == 0


def with_float32_ranks(values, q):
    """`torch.quantile` as it was before torch computed ranks in float64."""
    ordered, ranks = values.sort().values, q * (len(values) - 1)
    return torch.lerp(ordered[ranks.long()], ordered[ranks.ceil().long()], ranks - ranks.long())


@pytest.mark.parametrize("quantile", [torch.quantile, with_float32_ranks], ids=["this torch", "an older torch"])
def test_quantiles_are_torchs(monkeypatch, quantile):
    monkeypatch.setattr(torch, "quantile", quantile)
    depth, rng = fresh_copy(depth_module), np.random.default_rng(0)
    preset = replace(depth.PRESETS["hypersim"], train_size=None)
    for number in range(15):
        values = np.clip(rng.normal(3000, rng.integers(1, 2000), rng.integers(20, 250, 2)), 0, 65535).astype(np.uint16)
        if number == 0:  # two valid pixels
            values = np.array([[4000, 0, 4001, 65000]], np.uint16)
        pictures = {"rgb": np.zeros((*values.shape, 3), np.uint8), "depth": values}
        both = (make(pictures, preset, train=True, flipped=False) for make in (depth.plain_sample, depth.fast_sample))
        assert torch.equal(*(sample["depth_raw_norm"].view(torch.int32) for sample in both))  # as bits


def listed(folder: Path, text: str) -> Path:
    (folder / "some_list.txt").write_text(text, encoding="utf-8")
    return folder / "some_list.txt"


@pytest.mark.parametrize(
    ("text", "preset", "said"),
    [
        ("a.png b.png\na.png\n", "hypersim", "line 2 of .*some_list.txt has 1 columns instead of 2 or 3"),
        ("my scene/a.png my scene/b.png\n", "vkitti", "line 1 of .* 4 columns.*without blanks"),
        ("a.png b.png\n", "nyu", "2 columns instead of 3: each line lists rgb, depth, filled"),
        ("a.png None 700\n", "kitti", "names no pair that has a depth.*make_depth"),
        ("", "hypersim", "names no pair"),
        ("a.png b.png\n", "hypersimm", "preset must be one of hypersim, vkitti, nyu, kitti"),
    ],
)
def test_a_bad_list_is_named(tmp_path, text, preset, said):
    with pytest.raises(ValueError, match=said):
        DepthPairs(None, listed(tmp_path, text), preset=preset)


def test_a_missing_list_and_an_unknown_mode_are_named(sets, tmp_path):
    for missing in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(FileNotFoundError, match=r"is not a list file.*make_depth"):
            DepthPairs(None, missing)
    with pytest.raises(ValueError, match="mode must be one of train, evaluate, got 'val'"):
        pairs_of(sets, mode="val")


def test_names_are_parted_by_blanks_and_lines_as_python_parts_them(sets, tmp_path):
    """U+2028 ends a line for `str.splitlines`, and none of a file's."""
    path = listed(tmp_path, "a.png b.png\nc\u2028.png d.png\ne\x85.png f.png\n;$(id)*.png g.png\n")
    with open(path, encoding="utf-8") as file:
        expected = [line.split()[0] for line in file]
    assert list(DepthPairs(FolderStore(sets["hypersim"].parent / "data"), path).keys) == expected


def test_lines_without_depth_count_where_a_missing_file_is_named(sets, tmp_path):
    """Lines without depth are left out of the pairs, not of the count."""
    assert "1 lines without depth left out" in repr(pairs_of(sets, "kitti"))
    assert "left out" not in repr(pairs_of(sets))
    rgb, depth = sets["hypersim"].read_text().splitlines()[0].split()
    path = listed(tmp_path, f"{rgb} None\n{rgb} {depth}\n{rgb} None\n{rgb} elsewhere/{depth}\n")
    folder = sets["hypersim"].parent
    for store in (FolderStore(folder / "data"), TarStore(folder / "data.tar")):
        with pytest.raises(KeyError, match=rf"elsewhere/{depth}.*line 4 of .*some_list.txt.*store's root"):
            DepthPairs(store, path)[1]


def png(pixels: np.ndarray) -> bytes:
    return encoded(Image.fromarray(pixels), "PNG")


DEPTH = np.full((20, 30), 2000, np.uint16)
GOOD = {"rgb.png": png(np.zeros((20, 30, 3), np.uint8)), "depth.png": png(DEPTH)}


@pytest.mark.parametrize(
    ("bad", "preset", "error", "said"),
    [
        ({"rgb.png": b""}, "hypersim", DecodeError, "rgb: no complete picture in 0 bytes"),
        ({"depth.png": GOOD["depth.png"][:60]}, "hypersim", DecodeError, "depth: no complete picture in 60 bytes"),
        ({"rgb.png": GOOD["depth.png"]}, "hypersim", DecodeError, "rgb: uint16 .*not 8-bit RGB"),
        ({"depth.png": GOOD["rgb.png"]}, "hypersim", DecodeError, "depth: uint8 .*not 8- or 16-bit gray"),
        ({"rgb.png": png(np.zeros((20, 30, 4), np.uint8))}, "hypersim", DecodeError, "shape .20, 30, 4."),
        ({"depth.png": png(DEPTH[:10])}, "hypersim", ValueError, "differ in size"),
        ({"depth.png": png(DEPTH * 0)}, "hypersim", ValueError, "no pixel has a valid depth"),
        ({"depth.png": png(DEPTH * 0 + 3000)}, "hypersim", ValueError, "its depths have no range: .* within 3 m"),
        ({}, "kitti", ValueError, r"20 x 30 pixels .*cannot be cropped to \(352, 1216\)"),
    ],
)
@pytest.mark.parametrize("fast", [False, True])
def test_a_bad_file_is_named_with_its_line(tmp_path, bad, preset, error, said, fast):
    path = listed(tmp_path, "ok.png ok.png\nrgb.png depth.png")
    with pytest.raises(error, match=said) as failure:
        DepthPairs(MemoryStore({**GOOD, **bad}), path, preset=preset, fast=fast)[1]
    assert str(failure.value).startswith(f"rgb.png (line 2 of {path})")
    assert isinstance(failure.value, LabkitError)
    assert isinstance(failure.value, DecodeError) == (error is DecodeError)
