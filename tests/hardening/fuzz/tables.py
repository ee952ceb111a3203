"""Fuzz targets that are handed names, lists, tables, or a file of pixels."""

import json
import os
import struct
from functools import cache
from types import SimpleNamespace

import pandas as pd
from matplotlib import pyplot

import labkit as lk
from labkit.course import PixelError
from labkit.data.depth import PRESETS, read_list
from labkit.data.samples import MANIFEST
from labkit.data.shard_cache import find_shards
from labkit.data.sizes import parse_cache_name
from labkit.measure.frames import COLUMNS, make_frame, save_frame
from labkit.measure.statistics import quiet_summary
from tests.hardening.fuzz.oracle import empty_folder, may_refuse, seeded, split_options, write_input
from tests.hardening.inputs import image_bytes
from tests.memory_store import MemoryStore

_SUFFIXES = (
    ".jpg", ".jpeg", ".png", ".webp", ".avif", ".bmp", ".gif", ".heic", ".heif", ".jfif", ".jp2", ".jpe", ".jxl",
    ".pbm", ".pgm", ".pnm", ".ppm", ".tif", ".tiff",
)  # fmt: skip
_URL = "http://127.0.0.1:1/photos"


def size_name_seeds() -> dict[str, bytes]:
    """Names of one folder's files, one a line."""
    return {
        "a cache": b"a.jpg\na_0512x0768_sd.npz",
        "two that differ": b"a.jpg\na_0512x0768_sd.npz\na_0512x0512_sdxl.npz",
        "shared stem": b"a.jpg\na.png\na_0512x0768_flux.npz", "zero": b"a.jpg\na_0000x0000_sd.npz",
        "too large": b"a.jpg\na_99999999999999999999x0001_sd.npz",
        "hidden": b".a.jpg\nb.webp\n.a_0512x0768_sd.npz", "broken UTF-8": b"\xff.jpg\n\xff_0512x0768_anima.npz",
    }  # fmt: skip


@seeded(size_name_seeds)
def size_names(data: bytes) -> None:
    """Each image of a folder has one row, whatever lies beside it; a size comes from a name that states one."""
    folder = empty_folder("names")
    for name in set(data.split(b"\n")[:8]):
        if 0 < len(name) <= 255 and b"/" not in name and b"\0" not in name and name not in (b".", b".."):
            (folder / os.fsdecode(name)).touch()
        if parsed := parse_cache_name(os.fsdecode(name)):
            stem, width, height = parsed
            assert os.fsdecode(name).startswith(f"{stem}_{width:04d}x{height:04d}_")
    with may_refuse(FileNotFoundError, names=folder):
        frame = lk.collect_sizes(folder, progress=False)
        images = [name for name in os.listdir(folder) if name.lower().endswith(_SUFFIXES) and name[0] != "."]
        assert list(frame["path"]) == sorted(images)
        assert set(frame["source"]) <= {"cache", "unreadable"}  # the files are empty
        assert frame[frame["source"] == "cache"]["width"].gt(0).all()


def json_seeds() -> dict[str, bytes]:
    """The tables that labkit and servers keep as JSON; the first byte says which."""
    row = {"name": "shard-000000.tar", "n_samples": 1, "n_bytes": 1, "sha256": "0"}
    shards = {"settings": {}, "classes": ["a"], "n_samples": 1, "shards": [row]}
    photos = {"settings": {"profile": "imagenet", "seed": 0}, "photos": [{"key": "a/0.jpg", "bytes": 1, "sha256": "0"}]}
    return {
        **{f"sound {n}": bytes([n]) + json.dumps(table).encode() for n, table in enumerate((shards, photos, photos))},
        **{f"deep {n}": bytes([n]) + b"[" * 2000 for n in range(3)},
        "nested": b'\0{"a": {"b": ' + b"[" * 400 + b"]" * 400 + b"}}",
        "bomb": b'\0{"shards": [], "settings": ' + b"9" * 5000 + b"}",
    }


@seeded(json_seeds)
def json_tables(data: bytes) -> None:
    """A table of JSON is read, or refused in an error that names it."""
    kind, text = split_options(data)
    folder = empty_folder("json")
    (folder / MANIFEST).write_bytes(text)
    if kind % 3 == 0:
        with may_refuse(ValueError, names=folder / MANIFEST):
            assert all(isinstance(url, str) for url in find_shards(folder, verify=True, storage_options={}).urls)
    elif kind % 3 == 1:
        with may_refuse(ValueError, names=folder):
            lk.make_photos(folder, 1, progress=False)
            assert json.loads((folder / MANIFEST).read_bytes())["settings"]["seed"] == 0
    else:
        with may_refuse(FileNotFoundError, names=_URL):
            assert all(isinstance(key, str) for key in _served({"": b"<a href='listed.jpg'>", "manifest.json": text}))


def _served(pages: dict[str, bytes]) -> list[str]:
    """The keys of an HttpStore that gets these pages, without a server."""

    def get(url: str) -> SimpleNamespace:
        name = url.rpartition("/photos/")[2]
        status, headers = 200 if name in pages else 404, {"Content-Type": "text/html"}
        return SimpleNamespace(status=status, data=pages.get(name, b""), headers=headers, url=url)

    store = lk.HttpStore(_URL)
    store._client = SimpleNamespace(get=get)
    return list(store.keys())


def listing_seeds() -> dict[str, bytes]:
    """Listing pages as servers write them, and pages that lead astray."""
    return {
        "plain": b'<ul><li><a href="a.jpg">a</a><li><a href="b/">b/</a><li><a href="%F0%9F%98%80.png">x</a></ul>',
        "elsewhere": b'<a href="http://[x/a.jpg"><a href="//host/a.jpg"><a href="../../a.jpg"><a href="/x/../c.jpg">',
        "odd": b'<a href="?C=N;O=D"><a href="#a.jpg"><a href="a.jpg?x=1"><a href=".hidden.jpg"><a href="a%2Fb.jpg">',
        "markup": b"<!DOCTYPE html [<!ENTITY a \"b\">]><![CDATA[ <![if x]> <? php ?> <!-- --!> <a href='c.webp'",
        "no markup": b"<a href='a.jpg'><![<![",
        "folder of itself": b'<a href="./"><a href="x/"><a href="../photos/x/">',
    }  # fmt: skip


@seeded(listing_seeds)
def listings(data: bytes) -> None:
    """What a listing page leads to lies below its address, each key once; or OSError names the address."""
    with may_refuse(OSError, ValueError, names=f"{_URL}/"):
        keys = _served({"": data, "b/": data})
        assert len(keys) == len(set(keys))
        assert not any(part == "" or part[0] == "." for key in keys for part in key.split("/"))


def list_seeds() -> dict[str, bytes]:
    """List files; the first byte says of which preset."""
    return {
        "pairs": b"\0a/rgb.png a/depth.png\nb/rgb.png b/depth.png\n", "nyu": b"\2a.png b.png c.png\n",
        "kitti": b"\3a.png None\nb.png d.png 721.5\n", "columns": b"\0a.png\n", "blank": b"\0\n",
        "odd": b"\0\xff.png \xc2\xa0d.png\r\n\xe2\x80\xa8 x y\x85z w\0",
        "blanks": "\0a.png b.png\nc.png\u2028d.png\ne.png\x85f.png\ng.png\x0bh.png\ni.png\x1ej.png\n".encode(),
    }  # fmt: skip


@seeded(list_seeds)
def lists(data: bytes) -> None:
    """A list file gives the pairs that Python's own reading of its lines gives; an error only where they are none."""
    number, text = split_options(data)
    preset = list(PRESETS.values())[number % len(PRESETS)]
    path = write_input("list.txt", text)
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        lines = [line.split() for line in file]
    kept = [line for line in lines if line[1:2] != ["None"]]
    is_sound = bool(kept) and {len(line) for line in lines} <= {len(preset.columns), 3}
    with may_refuse(*([] if is_sound else [ValueError]), names=path):
        found = read_list(path, preset)
        for position, column in enumerate(preset.columns):
            assert list(found.names[column]) == [line[position] for line in kept]
        assert [lines[number - 1] for number in found.lines] == kept
        assert found.n_without_depth == len(lines) - len(kept)


@cache
def frame_seeds() -> dict[str, bytes]:
    """Frames of runs as CSV, sound and hostile."""
    rows = [
        {
            "variant": label, "round": number, "order": order, "is_warmup": number == 0, "n_images": 10, "cpu_s": 0.5,
            "steady_s": 1.0, "images_per_s": 10.0 * order + number, "peak_mem_mb": 100.0, "seed": 0, "storage": "",
        }
        for order, label in enumerate(["a", "b, \"c\""], 1)
        for number in range(3)
    ]  # fmt: skip
    frame = make_frame(rows, experiment="fuzz", baseline="a", env_id="machine", device="cpu", scale="ci")
    text = save_frame(frame, write_input("seed.csv", b"")).read_bytes()
    changed = {
        "zero": (b"11.0", b"0"), "negative": (b"11.0", b"-1"), "text": (b"11.0", b"fast"),
        "infinite": (b"11.0", b"inf"), "warm-up": (b"True", b"maybe"), "huge": (b"11.0", b"1e999"),
        "machine": (b"machine", b"other"), "numbers": (b"a,a", b"1,1"), "none": (b"a,a", b"None,None"),
    }  # fmt: skip
    seeds = {name: text.replace(old, new, 1) for name, (old, new) in changed.items()}
    return {**seeds, "sound": text, "header": ",".join(COLUMNS).encode(), "empty": b"", "zeros": b"\0" * 99}


@seeded(frame_seeds)
def frames(data: bytes) -> None:
    """A CSV is refused with its name, or is a frame that can be summarised and drawn, or refused, in words."""
    path = write_input("frame.csv", data)
    with may_refuse(ValueError, names=path):
        frame = lk.load_frame(path)
        again = lk.load_frame(save_frame(frame, write_input("again.csv", b"")))
        stated = list(COLUMNS)  # of further factors pandas guesses the types
        pd.testing.assert_frame_equal(frame[stated], again[stated], check_dtype=False)
        with may_refuse(ValueError, names=""):
            summary = quiet_summary(frame)
            assert set(summary["verdict"]) <= {"baseline", "faster", "slower", "inconclusive"}
            sure = summary[summary["verdict"].isin(["faster", "slower"])]
            assert ((sure["ci_low"] > 1) | (sure["ci_high"] < 1)).all()
            if len(data) % 64 == 0:  # drawing takes a hundred times as long as all the rest
                for plot in (lk.plot_throughput, lk.plot_speedup):
                    with may_refuse(ValueError, names=""):
                        plot(frame)
                    pyplot.close("all")


@cache
def pixel_seeds() -> dict[str, bytes]:
    """A file of three small images, and damaged ones."""
    path, keys = empty_folder("seed") / "seed.pixels", ["a/x.png", "a/y.png", "b/z.png"]
    lk.PixelStore.build(MemoryStore(dict.fromkeys(keys, image_bytes((5, 3)))), path, num_workers=0, progress=False)
    whole = path.read_bytes()
    newer = whole[:8] + b"\3" + whole[9:]
    return {"whole": whole, "cut": whole[:-1], "short": whole[:100], "empty": b"", "newer": newer}


@seeded(pixel_seeds)
def pixel_file(data: bytes) -> None:
    """A pixel file is refused with PixelError, or all its images lie inside it, in the order of its keys."""
    path = write_input("x.pixels", data)
    with may_refuse(PixelError, names=path):
        store, end = lk.PixelStore(path), 128
        assert len(store) == len(store.keys) == len(store.shapes) == len(store.labels)
        for index, (height, width) in enumerate(store.shapes.tolist()):
            pixels = store.pixels(index)
            assert pixels.shape == (height, width, 3)
            (offset,) = struct.unpack_from("<Q", data, 128 + 8 * index)
            assert end <= offset <= len(data) - pixels.nbytes, "images overlap, or lie outside"
            end = offset + pixels.nbytes
            assert pixels.tobytes() == data[offset:end]
        assert all(0 <= label < max(1, len(store.classes)) for label in store.labels)
        assert repr(store)
        with may_refuse(PixelError, names=path):
            store.verify(progress=False)
