"""What an import brings along: nothing that a training script does not use."""

import subprocess
import sys

import pytest

FAR = {"urllib3", "fsspec", "s3fs", "aiohttp", "requests", "botocore"}
TABLES = {"pandas", "matplotlib"}


@pytest.mark.parametrize(
    ("used", "unwanted"),
    [
        ("import labkit as lk", FAR | TABLES | {"numpy", "torch", "PIL", "psutil"}),
        ("import labkit as lk; lk.FolderStore", FAR | TABLES | {"torch", "PIL", "psutil", "cloudpickle", "tqdm"}),
        ("import labkit as lk; lk.BatchLoader", FAR | TABLES | {"psutil", "torchvision", "ray"}),
        ("import labkit as lk; lk.PixelStore", FAR | TABLES | {"psutil", "torchvision", "ray"}),
        ("import labkit as lk; lk.HttpStore; lk.ObjectStore; lk.TarStore; lk.open_store", FAR | TABLES | {"torch"}),
        ("import labkit as lk; lk.FolderStore; lk.BatchLoader; lk.PixelStore; lk.Buckets", FAR | TABLES | {"psutil"}),
    ],
)
def test_names_that_are_used_load_no_more_than_they_need(used, unwanted):
    program = f"{used}\nimport sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert "labkit" in loaded
    assert unwanted.intersection(loaded) == set()


def test_no_logger_of_another_library_is_touched():
    program = "import labkit as lk, logging; lk.HttpStore; lk.BatchLoader; print(*logging.root.manager.loggerDict)"
    named = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert [name for name in named if name.startswith(("urllib3", "fsspec", "aiohttp", "botocore"))] == []
