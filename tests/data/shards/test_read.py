"""Reading shards: every sample once an epoch on any ranks and workers, and nothing cut, broken or wrong goes unsaid."""

import gzip
import io
import itertools
import json
import os
import pickle
import re
import subprocess
import sys
import tarfile
import warnings
from pathlib import Path

import pytest
import torch
from PIL import Image
from scipy.stats import spearmanr
from torch.utils.data import DataLoader

from labkit import DecodeError, FolderStore, ImageDataset, read_shards, write_shards
from labkit.course import shuffle_quality
from labkit.data.shards_read import ShardWarning
from labkit.errors import TarError
from tests.memory_store import MemoryStore
from tests.paths import REPO
from tests.tars import make_tar


def picture(number: int) -> bytes:
    """Its color is its number."""
    buffer = io.BytesIO()
    Image.new("RGB", (2, 2), (number % 256, number // 256, 0)).save(buffer, "PNG")
    return buffer.getvalue()


PICTURE = picture(0)


def numbered(root: Path, n_samples: int, n_shards: int) -> Path:
    store = MemoryStore({f"all/{number:05d}.png": picture(number) for number in range(n_samples)})
    return write_shards(store, root, max_count=-(-n_samples // n_shards), engine="threads", progress=False)


def numbers(loader) -> list[int]:
    """Which samples came, in their order, of a data set or a loader without batches."""
    return [int(image[0, 0, 0]) + 256 * int(image[1, 0, 0]) for image, _ in loader]


@pytest.fixture(scope="module")
def forty(tmp_path_factory) -> Path:
    """Forty samples in seven shards: 6 in each, the last has 4."""
    return numbered(tmp_path_factory.mktemp("shards") / "set", 40, 7)


@pytest.fixture(scope="module")
def photos(first_photos) -> Path:
    return first_photos(10)


@pytest.fixture
def shards(photos, tmp_path) -> Path:
    """Two shards of photos, to be broken."""
    return write_shards(FolderStore(photos), tmp_path / "set", max_count=5, engine="threads", progress=False)


def test_items_are_those_of_the_stores_data_set(photos, shards):
    dataset, expected = read_shards(shards), ImageDataset(FolderStore(photos))
    assert dataset.classes == expected.classes
    pairs = list(zip(dataset, expected, strict=True))
    assert len(pairs) == 10
    for (image, label), (expected_image, expected_label) in pairs:
        assert torch.equal(image, expected_image)
        assert label == expected_label


def test_the_transform_is_applied(forty):
    assert [image for image, _ in read_shards(forty, transform=lambda image: image.shape)] == [(3, 2, 2)] * 40


def test_shards_may_be_named_in_many_ways(forty):
    names = sorted(str(path) for path in forty.glob("*.tar"))
    for urls in (forty, str(forty), f"{forty}/", f"{forty}/shard-{{000000..000006}}.tar", names, map(Path, names)):
        assert numbers(read_shards(urls)) == list(range(40))
    assert numbers(read_shards(forty / "shard-000002.tar")) == list(range(12, 18))
    assert read_shards(names).classes is None


@pytest.mark.parametrize(
    ("urls", "options", "error", "said"),
    [
        ("no/such/folder", {}, FileNotFoundError, "no/such/folder/manifest.json does not exist"),
        ("no/such-{0..2}.tar", {}, FileNotFoundError, "the shard no/such-0.tar does not exist, nor do 2 others of 3"),
        (Path("no.tar"), {}, FileNotFoundError, "no.tar does not exist"),
        ([], {}, ValueError, "no shard"),
        (["a.tar"], {"verify": True}, ValueError, "name the folder"),
        (None, {"decoder": "magic"}, ValueError, "turbojpeg"),
        (None, {"on_error": "hide"}, ValueError, "on_error must be one of raise, skip, got 'hide'"),
        (None, {"shuffle": -1}, ValueError, "shuffle must be an integer >= 0, got -1"),
        (None, {"samples_per_rank": 0}, ValueError, "samples_per_rank must be an integer >= 1, got 0"),
    ],
)
def test_bad_arguments(forty, urls, options, error, said):
    with pytest.raises(error, match=said):
        read_shards(forty if urls is None else urls, **options)


@pytest.mark.filterwarnings("ignore::labkit.data.shards_read.ShardWarning")
@pytest.mark.parametrize("world_size", range(1, 5))
@pytest.mark.parametrize("num_workers", range(1, 5))
def test_every_shard_has_one_reader(forty, monkeypatch, world_size, num_workers):
    monkeypatch.setenv("NUM_WORKERS", str(num_workers))
    parts = []
    for rank, worker in itertools.product(range(world_size), range(num_workers)):
        at(monkeypatch, rank, world_size)
        monkeypatch.setenv("WORKER", str(worker))
        parts.append({sample["__url__"] for sample in read_shards(forty, shuffle=5).samples()})
    assert sorted(shard for part in parts for shard in part) == sorted(map(str, forty.glob("*.tar")))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(("method", "num_workers"), [(None, 0), ("fork", 1), ("fork", 2), ("fork", 4), ("spawn", 2)])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_every_sample_comes_once_an_epoch_in_an_order_of_its_own(forty, method, num_workers):
    dataset = read_shards(forty, shuffle=5)
    options = {"multiprocessing_context": method, "persistent_workers": True} if num_workers else {}
    loader = DataLoader(dataset, batch_size=None, num_workers=num_workers, **options)
    epochs = []
    for epoch in (0, 1, 0):
        dataset.set_epoch(epoch)
        epochs.append(numbers(loader))
    assert all(sorted(order) == list(range(40)) for order in epochs)
    assert epochs[0] == epochs[2] != epochs[1]
    assert numbers(DataLoader(read_shards(forty, shuffle=5), batch_size=None, num_workers=num_workers)) == epochs[0]
    assert numbers(DataLoader(read_shards(forty, shuffle=5, seed=1), batch_size=None)) != epochs[0]


def test_without_shuffling_the_order_stays(forty):
    dataset = read_shards(forty)
    dataset.set_epoch(3)
    assert numbers(dataset) == list(range(40))


@pytest.mark.exhaustive
def test_torchrun_two_ranks_two_workers_each(tmp_path):
    folders = [numbered(tmp_path / f"{n_shards}", 300, n_shards) for n_shards in (1, 3, 7, 16)]
    assert [len(list(folder.glob("*.tar"))) for folder in folders] == [1, 3, 7, 16]
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    script = REPO / "tests" / "shard_ranks.py"
    done = subprocess.run([*run, str(script), *map(str, folders)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    warned = re.findall(r"ShardWarning: (\d+) shards for 2 ranks x 2 workers: (\d) of them", done.stderr)
    assert warned == [("1", "3"), ("3", "1")]
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    for name in ranks[0]:
        assert sorted(ranks[0][name] + ranks[1][name]) == list(range(300)), name
    for n_shards in (3, 7, 16):
        assert min(len(rank[f"{n_shards} 0"]) for rank in ranks) > 0
        assert ranks[0][f"{n_shards} 0"] != ranks[0][f"{n_shards} 1"]


def at(monkeypatch, rank: int, world_size: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world_size))


def test_a_spawned_worker_knows_the_rank_of_its_parent(forty, monkeypatch):
    """torch.distributed alone knows it: there is no such group in a fresh process."""
    dataset = read_shards(forty, shuffle=5)
    dataset.set_epoch(2)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(torch.distributed.group, "_WORLD", object(), raising=False)
    expected = numbers(dataset)
    pickled = pickle.dumps(dataset)
    monkeypatch.undo()
    assert numbers(pickle.loads(pickled)) == expected
    assert len({number // 6 for number in expected}) == 3  # of seven shards


def test_readers_without_a_shard_are_warned_of(forty, monkeypatch):
    at(monkeypatch, 0, 8)
    dataset = read_shards(forty)
    with pytest.warns(ShardWarning, match=r"7 shards for 8 ranks x 1 workers: 1 of them .*max_count") as caught:
        list(dataset)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(dataset)  # once is enough
        at(monkeypatch, 1, 8)
        list(read_shards(forty))  # and by one rank
        at(monkeypatch, 0, 7)
        list(read_shards(forty))
        at(monkeypatch, 0, 8)
        list(read_shards(forty, samples_per_rank=3))


@pytest.mark.slow
@pytest.mark.parametrize("n_shards", [1, 7])
def test_equal_ranks_where_they_are_asked_for(tmp_path, monkeypatch, n_shards):
    root, came = numbered(tmp_path / "set", 40, n_shards), []
    for rank in range(3):
        at(monkeypatch, rank, 3)
        dataset = read_shards(root, samples_per_rank=25, shuffle=4)
        loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork")
        came.append(numbers(loader))
        dataset.set_epoch(0)
        assert numbers(loader) == came[-1]
        dataset.set_epoch(1)
        assert numbers(loader) != came[-1]
    assert [len(numbers) for numbers in came] == [25, 25, 25]
    assert came[0] != came[1]
    assert set().union(*came) <= set(range(40))


def test_a_rank_that_cannot_be_made_equal_says_so(tmp_path):
    path = make_tar(tmp_path / "x.tar", {"a.cls": b"1", "a.png": PICTURE[:40]})
    with pytest.raises(ValueError, match="only 0 of 3 samples could be read"):
        list(read_shards(path, samples_per_rank=3, on_error="skip"))


@pytest.mark.parametrize(
    "cut", [100, 0, 5000, 512], ids=["in a header", "before a header", "in the data", "after a header"]
)
def test_a_cut_shard_is_an_error_that_names_the_last_whole_member(shards, cut):
    path = shards / "shard-000001.tar"
    with tarfile.open(path) as tar:
        members = tar.getmembers()
    os.truncate(path, members[5].offset + cut)
    came = []
    with pytest.raises(TarError, match="cut or damaged") as failure:
        came.extend(read_shards(shards))
    assert str(path) in str(failure.value)
    assert repr(members[4].name) in str(failure.value)
    assert len(came) in (5 + 2, 5 + 3)


def test_an_error_in_a_worker_names_the_shard(shards):
    os.truncate(shards / "shard-000001.tar", 50_000)
    batches = iter(DataLoader(read_shards(shards), batch_size=None, num_workers=2, multiprocessing_context="fork"))
    with pytest.raises(TarError, match=r"shard-000001\.tar is cut or damaged"):
        list(batches)
    batches._shutdown_workers()  # left to the garbage collector, torch waits five seconds for each


def test_compressed_shards(shards):
    path, packed = shards / "shard-000000.tar", shards / "packed.tar.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    plain = [(image.sum(), label) for image, label in read_shards(path)]
    assert [(image.sum(), label) for image, label in read_shards(packed)] == plain
    os.truncate(packed, 300_000)
    with pytest.raises(TarError, match=r"packed\.tar\.gz is cut or damaged"):
        list(read_shards(packed))


def test_verify_tells_a_changed_shard(shards):
    assert len(list(read_shards(shards, verify=True))) == 10
    path = shards / "shard-000001.tar"
    data = bytearray(path.read_bytes())
    data[len(data.rstrip(b"\0"))] ^= 1  # in the padding of the last member: nothing else would tell
    path.write_bytes(data)
    assert len(list(read_shards(shards))) == 10
    with pytest.raises(ValueError, match=r"shard-000001\.tar does not have the SHA-256 of its manifest"):
        list(read_shards(shards, verify=True))


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"a.png": PICTURE}, r"a\.png in .*x\.tar: a sample must have one image and a \.cls .* it has png"),
        ({"a.cls": b"1", "a.txt": b"1"}, r"it has cls, txt"),
        ({"a.cls": b"1", "a.png": PICTURE, "a.jpg": b"1"}, r"must have one image .* it has cls, png, jpg"),
        ({"a.cls": b"cat", "a.png": PICTURE}, r"a\.png in .*x\.tar: its label must be a 64-bit integer, got b'cat'"),
        ({"a.cls": b"9" * 30, "a.png": PICTURE}, r"x\.tar: its label must be a 64-bit integer, got b'9{20}'"),
        ({"x.__bad__": b"1", "x.cls": b"0", "x.png": PICTURE}, r"x\.tar: 'x\.__bad__' has a suffix that WebDataset"),
        ({"v1.0\n/x.png": PICTURE}, r"v1\.0\n/x\.png in .*x\.tar: a sample must have one image .* it has png"),
        ({"a.cls": b"1", "a.png": PICTURE, "a.PNG": PICTURE}, r"x\.tar: 'a\.PNG': duplicate file name"),
    ],
)
def test_samples_that_are_none_are_named(tmp_path, files, said):
    with pytest.raises(ValueError, match=said):
        list(read_shards(make_tar(tmp_path / "x.tar", files)))


def test_an_image_that_is_none_names_itself_and_its_shard(tmp_path):
    path = make_tar(tmp_path / "x.tar", {"all/a.cls": b"1", "all/a.png": PICTURE[:40], "b.cls": b"2", "b.png": PICTURE})
    with pytest.raises(DecodeError, match=r"all/a\.png in .*x\.tar: turbojpeg cannot decode 40 bytes"):
        list(read_shards(path))
    dataset = read_shards(path, on_error="skip")
    loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="fork")
    assert [label for _, label in loader] == [2]
    assert [skip.key for skip in dataset.skipped] == [f"all/a.png in {path}"]


def test_shuffle_quality_is_that_of_the_reader(tmp_path):
    root = numbered(tmp_path / "set", 200, 1)
    order = numbers(read_shards(root, shuffle=20, seed=3))
    assert shuffle_quality(200, 20, seed=3) == pytest.approx(spearmanr(range(200), order).statistic)


def test_a_larger_buffer_shuffles_better():
    assert shuffle_quality(500, 1) == 1
    qualities = [shuffle_quality(500, size, initial=size) for size in (10, 100, 250)]
    assert sorted(qualities, reverse=True) == qualities
    assert abs(shuffle_quality(500, 500, initial=500)) < 0.15
    assert shuffle_quality(500, 500, initial=100) > 0.3  # a full buffer, but one that gives before it is full
