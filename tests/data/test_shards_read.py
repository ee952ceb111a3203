"""`lk.read_shards`: every sample once an epoch, on any ranks and workers, from any place on, and no damage unsaid."""

import itertools
import json
import os
import pickle
import random
import tarfile
import warnings
import weakref
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import webdataset as wds
from hypothesis import given, settings, strategies as st
from scipy.stats import ks_2samp, spearmanr
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader

import labkit as lk
from labkit.data import shards_read
from labkit.data.shards_read import ShardWarning, resume, shuffled
from labkit.errors import TarError
from tests.shards import PICTURE, at, noisy, numbered, numbers, picture, write
from tests.tars import make_tar

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # of torch, about few cores

MIXED = {"shuffle": True, "shuffle_buffer": 6, "shuffle_initial": 3}
MODES = [{}, MIXED, {"samples_per_rank": 33}, {"samples_per_rank": 33, **MIXED}]
EPOCH = 2
in_every_mode = pytest.mark.parametrize("options", MODES, ids=str)


@pytest.fixture(scope="module")
def forty(tmp_path_factory) -> Path:
    """Forty samples in seven shards: 6 in each, the last has 4."""
    return numbered(tmp_path_factory.mktemp("shards") / "set", 40, 7)


@pytest.fixture
def shards(tmp_path) -> Path:
    """Two shards of five pictures each, to be broken."""
    return write(noisy(10), tmp_path / "set", max_count=5)


def run(root, readers, options, *, epoch=EPOCH, states=None, n_taken=lambda worker: None) -> tuple[dict, list[dict]]:
    """What each worker of each rank gives of an epoch until it is cut, and their states then."""
    came, states_then = {}, []
    world_size, num_workers = readers
    for number, (rank, worker) in enumerate(itertools.product(range(world_size), range(num_workers))):
        with pytest.MonkeyPatch.context() as monkeypatch:
            at(monkeypatch, rank, world_size, worker, num_workers)
            dataset = lk.read_shards(root, **options)
            dataset.set_epoch(epoch)
            if states is not None:
                dataset.load_state_dict(states[number])
            came[rank, worker] = numbers(itertools.islice(dataset, n_taken(worker)))
            states_then.append(json.loads(json.dumps(dataset.state_dict())))
    return came, states_then


def merged(came: dict) -> Counter:
    return Counter(itertools.chain.from_iterable(came.values()))


def fork_loader(dataset, num_workers=2, **options) -> DataLoader:
    return DataLoader(dataset, num_workers=num_workers, multiprocessing_context="fork", **options)


# What is read


def test_items_are_those_of_the_stores_data_set(shards):
    dataset, expected = lk.read_shards(shards), lk.ImageDataset(noisy(10))
    assert dataset.classes == expected.classes
    pairs = list(zip(dataset, expected, strict=True))
    assert len(pairs) == 10
    for (image, label), (expected_image, expected_label) in pairs:
        assert torch.equal(image, expected_image)
        assert label == expected_label
    assert {image for image, _ in lk.read_shards(shards, transform=lambda image: image.ndim)} == {3}


def test_shards_may_be_named_in_many_ways(forty, tmp_path):
    names = sorted(str(path) for path in forty.glob("*.tar"))
    for urls in (forty, str(forty), f"{forty}/", f"{forty}/shard-{{000000..000006}}.tar", names, map(Path, names)):
        dataset = lk.read_shards(urls)
        assert numbers(dataset) == numbers(dataset) == list(range(40))  # unshuffled, epochs are alike
    assert numbers(lk.read_shards(forty / "shard-000002.tar")) == list(range(12, 18))
    os.link(names[2], tmp_path / "A.TAR")
    assert numbers(lk.read_shards(tmp_path / "A.TAR")) == list(range(12, 18))
    assert lk.read_shards(names).classes is None


@pytest.mark.parametrize(
    ("urls", "options", "error", "said"),
    [
        ("no/such/folder", {}, FileNotFoundError, "no/such/folder/manifest.json does not exist"),
        ("no/such-{0..2}.tar", {}, FileNotFoundError, "the shard no/such-0.tar does not exist, nor do 2 others of 3"),
        ([], {}, ValueError, "no shard"),
        (["a.tar"], {"verify": True}, ValueError, "name the folder"),
        (None, {"decoder": "magic"}, ValueError, "turbojpeg"),
        (None, {"on_error": "hide"}, ValueError, "on_error must be one of raise, skip, got 'hide'"),
        (None, {"shuffle": 1000}, TypeError, "shuffle must be True or False, got 1000: .* is shuffle_buffer"),
        (None, {"shuffle_buffer": -1}, ValueError, "shuffle_buffer must be an integer >= 0, got -1"),
        (None, {"reads_in_flight": 0}, ValueError, "reads_in_flight must be an integer >= 1, got 0"),
    ],
)
def test_wrong_arguments_are_refused(forty, urls, options, error, said):
    with pytest.raises(error, match=said):
        lk.read_shards(forty if urls is None else urls, **options)


# Shared out among ranks and workers


@pytest.mark.filterwarnings("ignore::labkit.data.shards_read.ShardWarning")
@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 1), (2, 3), (3, 2), (4, 4)])
def test_every_shard_has_one_reader(forty, world_size, num_workers):
    came, _ = run(forty, (world_size, num_workers), {"shuffle": True, "shuffle_buffer": 5})
    assert merged(came) == Counter(range(40))
    parts = [{number // 6 for number in own} for own in came.values()]
    assert sorted(itertools.chain.from_iterable(parts)) == list(range(7))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(("method", "num_workers"), [(None, 0), ("forkserver", 2)])
def test_every_sample_comes_once_an_epoch_in_an_order_of_its_own(forty, method, num_workers):
    dataset = lk.read_shards(forty, shuffle=True, shuffle_buffer=5)
    options = {"multiprocessing_context": method, "persistent_workers": True} if num_workers else {}
    loader = DataLoader(dataset, batch_size=None, num_workers=num_workers, **options)
    epochs = []
    for epoch in (0, 1, 0):
        dataset.set_epoch(epoch)
        epochs.append(numbers(loader))
    assert all(sorted(order) == list(range(40)) for order in epochs)
    assert epochs[0] == epochs[2] != epochs[1]
    if not num_workers:
        assert numbers(lk.read_shards(forty, shuffle=True, shuffle_buffer=5)) == epochs[0]
        assert numbers(lk.read_shards(forty, shuffle=True, shuffle_buffer=5, seed=1)) != epochs[0]


def test_a_spawned_worker_knows_the_rank_of_its_parent(forty):
    """torch.distributed alone knows it: there is no such group in a fresh process."""
    dataset = lk.read_shards(forty, shuffle=True, shuffle_buffer=5)
    dataset.set_epoch(2)
    torch.distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    expected, pickled = numbers(dataset), pickle.dumps(dataset)
    torch.distributed.destroy_process_group()
    assert numbers(pickle.loads(pickled)) == expected
    assert len({number // 6 for number in expected}) == 3  # of seven shards


def test_readers_without_a_shard_are_warned_of_once_and_by_one_rank(forty, monkeypatch):
    at(monkeypatch, 0, 8)
    dataset = lk.read_shards(forty)
    with pytest.warns(ShardWarning, match=r"7 shards for 8 ranks x 1 workers: 1 of them .*max_count") as caught:
        list(dataset)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(dataset)
        for rank, world_size, options in ((1, 8, {}), (0, 7, {}), (0, 8, {"samples_per_rank": 3})):
            at(monkeypatch, rank, world_size)
            list(lk.read_shards(forty, **options))


# Epochs of a fixed length


@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 2), (3, 4), (5, 1), (8, 9)])
def test_every_sample_comes_as_often_as_there_were_passes(forty, world_size, num_workers):
    """Of epochs of seven samples a rank, so that some of nine workers have none."""
    counted, n_epochs = Counter(), -(-80 // (7 * world_size))
    for epoch in range(n_epochs):
        options = {"samples_per_rank": 7, "shuffle": True, "shuffle_buffer": 5}
        counted += merged(run(forty, (world_size, num_workers), options, epoch=epoch)[0])
    n_passes, rest = divmod(counted.total(), 40)
    assert counted.total() == n_epochs * 7 * world_size
    assert {counted[number] for number in range(40)} <= {n_passes, n_passes + bool(rest)}


@pytest.mark.parametrize("n_shards", [1, 7])
def test_ranks_get_equally_many_of_their_own(tmp_path, n_shards):
    root = numbered(tmp_path / "set", 40, n_shards)
    options = {"samples_per_rank": 25, "shuffle": True, "shuffle_buffer": 4}
    epochs = [run(root, (3, 2), options, epoch=epoch)[0] for epoch in (0, 1, 0)]
    assert epochs[0] == epochs[2] != epochs[1]
    for epoch in epochs:
        ranks = [epoch[rank, 0] + epoch[rank, 1] for rank in range(3)]
        assert [len(rank) for rank in ranks] == [25, 25, 25]
        assert ranks[0] != ranks[1]
        assert merged(epoch).keys() <= set(range(40))


def test_without_a_manifest_samples_are_counted(forty):
    urls = sorted(map(str, forty.glob("*.tar")))
    dataset = lk.read_shards(urls, samples_per_rank=30)
    first = numbers(dataset)
    dataset.set_epoch(1)
    assert first + numbers(dataset) == [*range(40), *range(20)]
    assert numbers(lk.read_shards([urls[0], urls[0]], samples_per_rank=12)) == [*range(6), *range(6)]


def tar_of(path: Path, images: list[bytes]) -> Path:
    """Samples of these images, whose labels are their numbers."""
    return make_tar(path, {
        f"{number:02d}.{suffix}": data for number, image in enumerate(images)
        for suffix, data in (("cls", b"%d" % number), ("png", image))
    })  # fmt: skip


def test_what_is_skipped_is_made_up_for_as_far_as_it_can_be(tmp_path):
    options = {"samples_per_rank": 3, "on_error": "skip"}
    dataset = lk.read_shards(tar_of(tmp_path / "x.tar", [PICTURE, PICTURE[:40], PICTURE]), **options)
    assert [label for _, label in dataset] == [0, 2, 0]
    assert len(dataset.skipped) == 1
    alone = tar_of(tmp_path / "alone.tar", [PICTURE] + [PICTURE[:40]] * 3)
    assert numbers(lk.read_shards(alone, **options)) == [0, 0, 0]
    with pytest.raises(ValueError, match="only 0 of 3 samples could be read"):
        list(lk.read_shards(tar_of(tmp_path / "x.tar", [PICTURE[:40]]), **options))


def test_a_shard_with_fewer_samples_than_its_manifest_says_is_an_error(shards):
    path = shards / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["shards"][0]["n_samples"] += 1
    path.write_text(json.dumps(manifest))
    for options in ({}, {"samples_per_rank": 10}):
        with pytest.raises(ValueError, match=r"shard-000000\.tar has fewer samples than the 6 of its manifest"):
            list(lk.read_shards(shards, **options))


def test_a_shard_whose_last_sample_is_zeros_is_an_error(shards):
    """Few zeros at the end of a tar are what its writer fills a record with: only the manifest knows better."""
    path = shards / "shard-000000.tar"
    with tarfile.open(path) as tar:
        *_, first_of_last, _ = tar
    whole = path.read_bytes()
    path.write_bytes(whole[: first_of_last.offset] + bytes(len(whole) - first_of_last.offset))
    with pytest.raises(ValueError, match=r"shard-000000\.tar has fewer samples than the 5 of its manifest"):
        list(lk.read_shards(shards))


# The shuffle buffer

SIZES = st.integers(1, 40)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 120), st.integers(0, 40), SIZES, st.text(max_size=3))
def test_the_order_is_a_permutation_that_the_buffer_could_give(count, size, initial, seed):
    taken, given_items = [], []

    def source():
        for number in range(count):
            taken.append(number)
            yield number

    for number in shuffled(source(), size, initial, seed):
        given_items.append(number)
        assert len(taken) - len(given_items) < max(size, 1)  # what the buffer still holds
    assert sorted(given_items) == list(range(count))
    assert size > 1 or given_items == list(range(count))


@pytest.mark.parametrize(("size", "initial"), [(100, 10), (1000, 1000)])
def test_its_displacements_are_those_of_webdataset(size, initial):
    ours = np.fromiter(shuffled(range(3000), size, initial, "0"), np.int64)
    theirs = np.fromiter(wds.shuffle(size, initial=initial, rng=random.Random(0))(iter(range(3000))), np.int64)
    displacements = [np.abs(order - np.arange(3000)) for order in (ours, theirs)]
    assert ks_2samp(*displacements).pvalue > 0.001


class Item:
    def __init__(self, number):
        self.number = number


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 80), SIZES, SIZES, st.data())
def test_the_rest_of_an_order_reads_and_holds_no_more_than_it_needs(count, size, initial, data):
    whole = list(shuffled(range(count), size, initial, "seed"))
    n_read = data.draw(st.integers(0, count))
    begun_at, rest, alive = [], [], weakref.WeakSet()

    def made(number):
        alive.add(item := Item(number))
        return item

    def read_from(first):
        begun_at.append(first)
        return map(made, range(first, count))

    for item in resume(shuffled(range(count), size, initial, "seed"), n_read, read_from):
        rest.append(item.number)
        assert len(alive) <= size + 2  # the buffer, and the two that are being handed over
    assert rest == whole[n_read:]
    if n_read < count:
        assert begun_at == [min(whole[n_read:])]


def test_a_full_buffer_mixes_more_and_none_shuffles_shards_alone(tmp_path):
    def correlation(initial):
        options = {"shuffle": True, "shuffle_buffer": 200, "shuffle_initial": initial}
        return spearmanr(range(200), numbers(lk.read_shards(one_shard, **options))).statistic

    one_shard = numbered(tmp_path / "one", 200, 1)
    assert abs(correlation(200)) < 0.2
    assert correlation(20) > 0.3  # a buffer that gives before it is full
    several = numbers(lk.read_shards(numbered(tmp_path / "several", 30, 6), shuffle=True, shuffle_buffer=0))
    assert sorted(several) == list(range(30)) != several
    assert all(several[start : start + 5] == list(range(several[start], several[start] + 5)) for start in (0, 5, 25))


# Going on in mid-epoch


@in_every_mode
@pytest.mark.parametrize("readers", [(2, 3), (1, 4)], ids=str)
def test_each_reader_goes_on_in_its_order_and_decodes_nothing_again(forty, options, readers, monkeypatch):
    whole, _ = run(forty, readers, options)
    begun, states = run(forty, readers, options, n_taken=lambda worker: 2 + worker)
    decode, decoded = shards_read.decode, []
    monkeypatch.setattr(shards_read, "decode", lambda *data, **key: decoded.append(1) or decode(*data, **key))
    further, states = run(forty, readers, options, states=states, n_taken=lambda worker: 3 - worker)
    rest, ends = run(forty, readers, options, states=states)
    assert {reader: taken + further[reader] + rest[reader] for reader, taken in begun.items()} == whole
    assert len(decoded) == merged(further).total() + merged(rest).total()
    assert merged(run(forty, readers, options, states=ends)[0]).total() == 0, "the epoch is over"
    assert all(len(json.dumps(state)) < 200 for state in states)


@in_every_mode
@pytest.mark.parametrize("n_taken", [0, 7, 33])
def test_a_resumed_epoch_is_followed_by_whole_ones(forty, options, n_taken):
    whole, following = (run(forty, (1, 1), options, epoch=epoch)[0][0, 0] for epoch in (EPOCH, EPOCH + 1))
    came, [state] = run(forty, (1, 1), options, n_taken=lambda worker: n_taken)
    assert came == {(0, 0): whole[:n_taken]}
    resumed = lk.read_shards(forty, **options)
    resumed.load_state_dict(state)
    assert [numbers(resumed), numbers(resumed)] == [whole[n_taken:], following]
    resumed.set_epoch(EPOCH)
    assert numbers(resumed) == whole  # from its beginning


@pytest.fixture(scope="module")
def damaged(tmp_path_factory) -> list[str]:
    """Twenty samples in four shards, of which 3 and 11 are cut."""
    folder, images = tmp_path_factory.mktemp("damaged"), [picture(number) for number in range(20)]
    for number in (3, 11):
        images[number] = images[number][:40]
    return [str(tar_of(folder / f"{at}.tar", images[at : at + 5])) for at in range(0, 20, 5)]


@pytest.mark.parametrize("n_taken", [1, 6])
@pytest.mark.parametrize("samples_per_rank", [None, 20])
def test_what_is_skipped_is_left_out_or_made_up_for_after_a_resume_too(damaged, n_taken, samples_per_rank):
    options = {"samples_per_rank": samples_per_rank, "on_error": "skip", **MIXED}
    whole, _ = run(damaged, (1, 2), options)
    begun, states = run(damaged, (1, 2), options, n_taken=lambda worker: n_taken)
    rest, _ = run(damaged, (1, 2), options, states=states)
    assert {reader: taken + rest[reader] for reader, taken in begun.items()} == whole
    assert merged(whole).keys() == set(range(20)) - {3, 11}
    assert merged(whole).total() == (samples_per_rank or 18)


def test_one_worker_goes_on_with_what_its_parent_loaded_and_once(forty):
    dataset = lk.read_shards(forty, **MIXED)
    taken, state = numbers(itertools.islice(dataset, 5)), dataset.state_dict()
    dataset.load_state_dict(state)
    loader = fork_loader(dataset, 1, batch_size=None)
    epochs = [taken + numbers(loader), numbers(loader)]
    fresh = lk.read_shards(forty, **MIXED)
    assert epochs == [numbers(fresh), numbers(fresh)]


@pytest.mark.parametrize("readers", [(1, 2), (2, 2), (4, 1)], ids=str)
def test_a_state_of_another_reader_is_refused_by_name(forty, readers):
    _, states = run(forty, (2, 1), {}, n_taken=lambda worker: 1)
    with pytest.raises(ValueError, match=r"taken by worker 0 of 1 on rank [01] of 2, and this is worker \d of .* go"):
        run(forty, readers, {}, states=states[::-1] * 2)


@pytest.mark.parametrize("options", [{"seed": 1}, {"shuffle": True}, {"samples_per_rank": 3}, None], ids=str)
def test_a_state_of_other_settings_or_shards_is_refused(forty, tmp_path, options):
    other = lk.read_shards(numbered(tmp_path / "other", 10, 2) if options is None else forty, **(options or {}))
    with pytest.raises(ValueError, match="of another order of samples: shards, shuffle"):
        lk.read_shards(forty).load_state_dict(other.state_dict())


def test_what_is_no_state_is_refused_with_the_remedy(forty):
    dataset = lk.read_shards(forty)
    wrong = [dataset.state_dict() | change for change in ({"reader": [0, 1]}, {"epoch": "1"}, {"n_read": None})]
    for state in (None, {}, [None], {"_snapshot": {}}, *wrong):
        with pytest.raises(ValueError, match=r"not a state of read_shards .* a loader's state goes to the loader"):
            dataset.load_state_dict(state)


# Damage


def test_an_error_in_a_worker_names_the_shard(shards):
    os.truncate(shards / "shard-000001.tar", 50_000)
    batches = iter(fork_loader(lk.read_shards(shards), batch_size=None))
    with pytest.raises(TarError, match=r"shard-000001\.tar is cut or damaged"):
        list(batches)
    batches._shutdown_workers()  # when they are collected as garbage, torch waits seconds for each of them


def test_verify_tells_a_changed_shard(shards):
    assert len(list(lk.read_shards(shards, verify=True))) == 10
    path = shards / "shard-000001.tar"
    data = bytearray(path.read_bytes())
    data[len(data.rstrip(b"\0"))] ^= 1  # in the padding of the last member: nothing else would tell
    path.write_bytes(data)
    assert len(list(lk.read_shards(shards))) == 10
    with pytest.raises(ValueError, match=r"shard-000001\.tar does not have the SHA-256 of its manifest"):
        list(lk.read_shards(shards, verify=True))


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"a.cls": b"1", "a.txt": b"1"}, r"it has cls, txt"),
        ({"a.cls": b"1", "a.png": PICTURE, "a.jpg": b"1"}, r"must have one image .* it has cls, png, jpg"),
        ({"a.cls": b"cat", "a.png": PICTURE}, r"a\.png in .*x\.tar: its label must be a 64-bit integer, got b'cat'"),
        ({"a.cls": b"9" * 30, "a.png": PICTURE}, r"x\.tar: its label must be a 64-bit integer, got b'9{20}'"),
        ({"x.__bad__": b"1", "x.cls": b"0", "x.png": PICTURE}, r"x\.tar: 'x\.__bad__' has a suffix that WebDataset"),
        ({"a.cls": b"1", "a.png": PICTURE, "a.PNG": PICTURE}, r"x\.tar: 'a\.PNG': duplicate file name"),
    ],
)
def test_samples_that_are_none_are_named(tmp_path, files, said):
    with pytest.raises(ValueError, match=said):
        list(lk.read_shards(make_tar(tmp_path / "x.tar", files)))


def test_an_image_that_is_none_names_itself_and_its_shard_or_is_skipped(tmp_path):
    path = make_tar(tmp_path / "x.tar", {"all/a.cls": b"1", "all/a.png": PICTURE[:40], "b.cls": b"2", "b.png": PICTURE})
    with pytest.raises(lk.DecodeError, match=r"all/a\.png in .*x\.tar: turbojpeg cannot decode 40 bytes"):
        list(lk.read_shards(path))
    dataset = lk.read_shards(path, on_error="skip")
    assert [label for _, label in fork_loader(dataset, 1, batch_size=None)] == [2]
    assert [skip.key for skip in dataset.skipped] == [f"all/a.png in {path}"]
