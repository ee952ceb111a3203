"""Input that fuzzing or reading found to end in another error than the documented one; each failed before its mend."""

import json
import os

import pytest

from labkit.data.shard_writer import UNFINISHED, write_shards

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d494844520000000100000001080200000090"
    "7753de0000000c49444154789c63606060000000040001f6177f380000000049454e44ae426082"
)  # 1 x 1, RGB


class Store:
    """Images by key, in memory."""

    def __init__(self, *keys: str, data: bytes = PNG):
        self._keys, self._data = sorted(keys), data

    def keys(self) -> list[str]:
        return self._keys

    def read(self, key: str) -> bytes:
        return self._data


@pytest.mark.parametrize("text", [b"{", b"[" * 5000, b"[]", b"\xff"])
def test_damaged_notes_of_an_unfinished_run_are_named(tmp_path, text):
    root = tmp_path / "shards"
    os.makedirs(root / UNFINISHED)
    (root / UNFINISHED / "settings.json").write_bytes(text)
    with pytest.raises(ValueError, match=r"settings\.json is damaged: .*another folder"):
        write_shards(Store("a.png"), root, engine="threads", progress=False)


@pytest.mark.parametrize("name", ["../up.tar", "", 7, None, "/etc/x.tar"])
def test_a_manifest_names_no_shard_outside_its_folder(tmp_path, name):
    from labkit.data.shard_reader import read_shards

    root = write_shards(Store("a.png"), tmp_path / "shards", engine="threads", progress=False)
    content = json.loads((root / "manifest.json").read_bytes())
    content["shards"][0]["name"] = name
    (root / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"manifest\.json is not a manifest"):
        read_shards(root)
