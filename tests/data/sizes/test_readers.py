"""The choice of readers for many headers; any choice gives the same headers."""

import os

import pytest
from PIL import Image

from labkit.data import sizes as size_readers
from labkit.data.headers import read_header
from labkit.data.sizes import Readers, choose_readers, disk_under, read_headers
from tests.image_files import encoded

US, MS = 1e-6, 1e-3
MANY = 10**6


@pytest.mark.parametrize(
    ("wall_s", "cpu_s", "n_files", "options", "expected"),
    [
        (7 * US, 7 * US, 1000, {}, ("local", 1)),
        (7 * US, 7 * US, MANY, {}, ("local", 4)),
        (7 * US, 7 * US, MANY, {"cores": 1}, ("local", 1)),
        (7 * US, 7 * US, MANY, {"rotating": True}, ("local", 4)),  # from memory: the disk does not matter
        (7 * US, 7 * US, 1000, {"num_workers": 3}, ("local", 3)),
        (30 * US, 10 * US, MANY, {}, ("local", 4)),  # a busy machine, no storage
        (90 * US, 40 * US, 1000, {}, ("threads", 6)),
        (90 * US, 40 * US, 1000, {"rotating": True}, ("threads", 6)),  # too fast for a head that travels
        (5 * MS, 40 * US, 1000, {}, ("threads", 32)),
        (9 * MS, 40 * US, 1000, {"rotating": True}, ("threads", 1)),
        (9 * MS, 40 * US, MANY, {"rotating": True, "num_workers": 2}, ("threads", 2)),
    ],
)
def test_readers_are_chosen_by_what_a_file_took(wall_s, cpu_s, n_files, options, expected):
    assert choose_readers(wall_s, cpu_s, n_files, **{"rotating": False, "cores": 4, **options}) == expected


@pytest.fixture
def paths(tmp_path) -> list[str]:
    """300 files, one in ten broken."""
    paths = [tmp_path / f"{number:03}.png" for number in range(300)]
    for number, path in enumerate(paths):
        path.write_bytes(encoded(Image.new("RGB", (number + 1, 2)), "PNG") if number % 10 else b"broken")
    return list(map(str, paths))


@pytest.mark.parametrize("engine", ["threads", "local"])
def test_any_readers_give_the_same_headers_in_order(paths, monkeypatch, engine):
    expected = [read_header(path) for path in paths]
    assert [header.width for header in expected[:12]] == [None, *range(2, 11), None, 12]
    monkeypatch.setattr(size_readers, "choose_readers", lambda *_, **__: Readers(engine, 2))
    assert read_headers(paths, progress=False) == expected
    assert read_headers(paths[:3]) == expected[:3]
    assert read_headers([]) == []


@pytest.mark.parametrize(("flag", "expected"), [("1\n", ("sda", True)), ("0\n", ("sda", False)), (None, ("", False))])
@pytest.mark.parametrize("layout", ["disk", "partition"])
def test_the_kernels_word_on_rotation(tmp_path, flag, expected, layout):
    disk = tmp_path / "block" / "sda"
    block = disk if layout == "disk" else disk / "sda1"
    block.mkdir(parents=True)
    if flag:
        (disk / "queue").mkdir()
        (disk / "queue" / "rotational").write_text(flag)
    device = os.stat(tmp_path).st_dev
    (tmp_path / f"{os.major(device)}:{os.minor(device)}").symlink_to(block)
    assert disk_under(tmp_path, devices=tmp_path) == expected
