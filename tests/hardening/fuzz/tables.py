"""Fuzz targets that are handed lists, or tables of JSON or HTML."""

import json
from types import SimpleNamespace

import labkit as lk
from labkit.data.depth import PRESETS, read_list
from labkit.data.samples import MANIFEST
from labkit.data.shards_fetch import find_shards
from tests.hardening.fuzz.oracle import empty_folder, may_refuse, seeded, split_options, write_input

_URL = "http://127.0.0.1:1/photos"


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
