"""States of `read_shards`: each reader goes on where it was, and with no state of another reader, or of another set."""

import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from labkit import read_shards
from labkit.data import shards_read as module
from tests.data.shards.test_read import PICTURE, at, numbered, numbers, picture
from tests.tars import make_tar

# Of torchdata, about torch itself.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

MIXED = {"shuffle": 6, "shuffle_initial": 3}
MODES = [{}, MIXED, {"samples_per_rank": 33}, {"samples_per_rank": 33, **MIXED}]
EPOCH = 2


@pytest.fixture(scope="module")
def forty(tmp_path_factory) -> Path:
    return numbered(tmp_path_factory.mktemp("shards") / "set", 40, 7)


def run(
    root: Path, options: dict, readers: tuple[int, int], states: list | None = None, n_taken: Callable | None = None
) -> tuple[dict[tuple[int, int], list[int]], list]:
    """What each worker of each rank gives of an epoch until it is cut, and their states then."""
    came, states_then = {}, []
    world_size, num_workers = readers
    for number, (rank, worker) in enumerate(itertools.product(range(world_size), range(num_workers))):
        with pytest.MonkeyPatch.context() as monkeypatch:
            at(monkeypatch, rank, world_size)
            monkeypatch.setenv("WORKER", str(worker))
            monkeypatch.setenv("NUM_WORKERS", str(num_workers))
            dataset = read_shards(root, **options)
            dataset.set_epoch(EPOCH)
            if states is not None:
                dataset.load_state_dict(states[number])
            came[rank, worker] = numbers(itertools.islice(dataset, n_taken(worker) if n_taken else None))
            states_then.append(json.loads(json.dumps(dataset.state_dict())))
    return came, states_then


def merged(came: dict[tuple[int, int], list[int]]) -> Counter:
    return Counter(itertools.chain.from_iterable(came.values()))


@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize("readers", [(2, 3), (3, 1), (1, 4)], ids=str)
def test_each_reader_goes_on_in_its_order_and_decodes_nothing_again(forty, options, readers, monkeypatch):
    whole, _ = run(forty, options, readers)
    begun, states = run(forty, options, readers, n_taken=lambda worker: 2 + worker)
    decode, decoded = module.decode, []
    monkeypatch.setattr(module, "decode", lambda *data, **key: decoded.append(1) or decode(*data, **key))
    further, states = run(forty, options, readers, states, lambda worker: 3 - worker)
    rest, ends = run(forty, options, readers, states)
    assert {reader: taken + further[reader] + rest[reader] for reader, taken in begun.items()} == whole
    assert len(decoded) == merged(further).total() + merged(rest).total()
    assert merged(run(forty, options, readers, ends)[0]).total() == 0, "the epoch is over"
    assert all(len(json.dumps(state)) < 200 for state in states)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory) -> list[str]:
    """Twenty samples in four shards, of which 3 and 11 are cut."""
    folder, paths = tmp_path_factory.mktemp("damaged"), []
    for shard in range(4):
        members = {}
        for number in range(shard * 5, shard * 5 + 5):
            members[f"{number:02d}.cls"] = b"0"
            members[f"{number:02d}.png"] = picture(number)[: 40 if number in (3, 11) else None]
        paths.append(str(make_tar(folder / f"{shard}.tar", members)))
    return paths


@pytest.mark.parametrize("n_taken", [1, 3, 6])
@pytest.mark.parametrize("samples_per_rank", [None, 20])
def test_what_is_skipped_is_left_out_or_made_up_for(damaged, n_taken, samples_per_rank):
    options = {"samples_per_rank": samples_per_rank, "on_error": "skip", **MIXED}
    whole, _ = run(damaged, options, (1, 2))
    begun, states = run(damaged, options, (1, 2), n_taken=lambda worker: n_taken)
    rest, _ = run(damaged, options, (1, 2), states)
    assert {reader: taken + rest[reader] for reader, taken in begun.items()} == whole
    assert merged(whole).keys() == set(range(20)) - {3, 11}
    assert merged(whole).total() == (samples_per_rank or 18)


def test_the_one_that_can_be_read_comes_again_for_all(tmp_path):
    members = {f"{number}.{suffix}": data for number in range(4)
               for suffix, data in (("cls", b"0"), ("png", PICTURE[: None if number == 0 else 40]))}  # fmt: skip
    options = {"samples_per_rank": 4, "on_error": "skip"}
    tar = make_tar(tmp_path / "x.tar", members)
    _, states = run(tar, options, (1, 1), n_taken=lambda worker: 1)
    rest, _ = run(tar, options, (1, 1), states)
    assert merged(rest) == {0: 3}


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_pass_after_a_resumed_one_is_whole(forty):
    def load(state=None):
        dataset = read_shards(forty, **MIXED)
        dataset.set_epoch(EPOCH)
        loader = StatefulDataLoader(dataset, batch_size=4, num_workers=2, multiprocessing_context="fork")
        if state:
            loader.load_state_dict(state)
        return loader

    whole, begun = numbers_of(load()), load()
    came = numbers_of(itertools.islice(begun, 3))
    loader = load(begun.state_dict())
    assert came + numbers_of(loader) == whole
    assert numbers_of(loader) == whole
    assert Counter(numbers_of(DataLoader(loader.dataset, batch_size=4))) == Counter(whole)


def numbers_of(batches) -> list[int]:
    return [int(image[0, 0, 0]) for images, _ in batches for image in images]


def test_one_worker_goes_on_with_what_its_parent_loaded_and_once(forty):
    dataset = read_shards(forty, **MIXED)
    taken, state = numbers(itertools.islice(dataset, 5)), dataset.state_dict()
    dataset.load_state_dict(state)
    loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="fork")
    epochs = [taken + numbers(loader), numbers(loader)]
    fresh = read_shards(forty, **MIXED)
    assert epochs == [numbers(fresh), numbers(fresh)]


def test_a_state_of_another_epoch_than_is_set_is_let_go(forty):
    dataset = read_shards(forty, **MIXED)
    list(itertools.islice(dataset, 5))
    dataset.load_state_dict(dataset.state_dict())
    dataset.set_epoch(3)
    assert sorted(numbers(dataset)) == list(range(40))


@pytest.mark.parametrize("readers", [(1, 2), (2, 2), (4, 1)], ids=str)
def test_a_state_of_another_reader_is_refused_by_name(forty, readers):
    _, states = run(forty, {}, (2, 1), n_taken=lambda worker: 1)
    with pytest.raises(ValueError, match=r"taken by worker 0 of 1 on rank [01] of 2, and this is worker \d of .* go"):
        run(forty, {}, readers, states[::-1] * 2)


@pytest.mark.parametrize(
    ("options", "change", "said"),
    [
        ({"seed": 1}, {}, "of another order of samples: shards, shuffle"),
        ({"shuffle": 2}, {}, "of another order"),
        ({"samples_per_rank": 3}, {}, "of another order"),
        ({}, {"reader": [0, 1]}, "not a state"),
        ({}, {"epoch": "1"}, "not a state"),
        ({}, {"n_read": None}, "not a state of read_shards"),
    ],
)
def test_other_settings_and_other_contents_are_refused(forty, options, change, said):
    state = read_shards(forty).state_dict() | change
    with pytest.raises(ValueError, match=said):
        read_shards(forty, **options).load_state_dict(state)


def test_none_and_other_shards(forty, tmp_path):
    for state in (None, {}, [None], {"_snapshot": {}}):
        with pytest.raises(ValueError, match=r"not a state of read_shards .* a loader's state goes to the loader"):
            read_shards(forty).load_state_dict(state)
    other = read_shards(numbered(tmp_path / "other", 10, 2))
    with pytest.raises(ValueError, match="of another order"):
        other.load_state_dict(read_shards(forty).state_dict())
