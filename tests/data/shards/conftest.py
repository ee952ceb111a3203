"""Shards for the tests of this folder."""

from pathlib import Path

import pytest

import labkit as lk


@pytest.fixture(scope="module")
def shards(first_photos, tmp_path_factory) -> Path:
    """Fourteen photos in five shards."""
    root = tmp_path_factory.mktemp("shards") / "set"
    return lk.write_shards(lk.FolderStore(first_photos(14)), root, max_count=3, engine="threads", progress=False)
