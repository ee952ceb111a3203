"""Shared by the tests of loaders."""

import gc
import multiprocessing

import numpy as np
import pytest
from PIL import Image

import labkit as lk
from tests.loaders import eventually


@pytest.fixture(autouse=True)
def _no_worker_is_left():
    """Whatever a test did: when its loader is gone, so are the workers."""
    yield
    if multiprocessing.active_children():
        gc.collect()  # a second, in a process that has imported everything
    assert eventually(lambda: multiprocessing.active_children() == [])


@pytest.fixture(scope="session")
def pictures(tmp_path_factory) -> lk.FolderStore:
    """12 small JPEGs of several sizes, in three classes: to read, never to change."""
    root = tmp_path_factory.mktemp("pictures")
    generator = np.random.default_rng(0)
    for number in range(12):
        path = root / f"class{number % 3}" / f"{number:02}.jpg"
        path.parent.mkdir(exist_ok=True)
        coarse = Image.fromarray(generator.integers(0, 256, (9, 12, 3), dtype=np.uint8))
        coarse.resize((96 + 8 * number, 80), Image.Resampling.BICUBIC).save(path, quality=90)
    return lk.FolderStore(root)


@pytest.fixture(scope="session")
def pixels(pictures, tmp_path_factory) -> lk.PixelStore:
    """The pixels of the pictures."""
    path = tmp_path_factory.mktemp("pixels") / "set.pixels"
    return lk.PixelStore.build(pictures, path, short_side=64, engine="threads", progress=False)
