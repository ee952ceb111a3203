"""States of `read_shards` on other ranks and workers: every sample that is left comes once, and none given before."""

import itertools
import json
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies
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
EXHAUSTIVE = pytest.mark.exhaustive
REST = [(2, 1, 3), (2, 4, 5), (0, 2, 3), (2, 3, 0)]


@pytest.fixture(scope="module")
def forty(tmp_path_factory) -> Path:
    return numbered(tmp_path_factory.mktemp("shards") / "set", 40, 7)


def run(
    root: Path, options: dict, readers: tuple[int, int], states: list | None = None, n_taken: Callable | None = None
) -> tuple[dict[tuple[int, int], list[int]], list]:
    """What each worker of each rank gives of an epoch until it is cut, and their states then."""
    came, states_then = {}, []
    world_size, num_workers = readers
    for rank, worker in itertools.product(range(world_size), range(num_workers)):
        with pytest.MonkeyPatch.context() as monkeypatch:
            at(monkeypatch, rank, world_size)
            monkeypatch.setenv("WORKER", str(worker))
            monkeypatch.setenv("NUM_WORKERS", str(num_workers))
            dataset = read_shards(root, **options)
            dataset.set_epoch(EPOCH)
            if states is not None:
                dataset.load_state_dict(states)
            came[rank, worker] = numbers(itertools.islice(dataset, n_taken(worker) if n_taken else None))
            states_then.append(json.loads(json.dumps(dataset.state_dict())))
    return came, states_then


def merged(came: dict[tuple[int, int], list[int]]) -> Counter:
    return Counter(itertools.chain.from_iterable(came.values()))


READERS = strategies.tuples(strategies.integers(1, 3), strategies.integers(1, 3))
CUTS = strategies.tuples(strategies.integers(1, 9), strategies.integers(0, 9), strategies.integers(0, 9))  # by worker


class TestOtherReaders:
    @pytest.mark.filterwarnings("ignore::labkit.data.shards_read.ShardWarning")
    @settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(strategies.lists(strategies.tuples(READERS, CUTS), min_size=1, max_size=2), READERS,
           strategies.booleans(), strategies.sampled_from([None, 3, 13, 40]))  # fmt: skip
    def test_each_sample_comes_once_whoever_goes_on(self, forty, begun, last, shuffle, samples_per_rank):
        options = {"samples_per_rank": samples_per_rank, **(MIXED if shuffle else {})}
        expected = merged(run(forty, options, begun[0][0])[0])
        came, states, n_again = Counter(), None, 0
        runs = [*((readers, cuts.__getitem__) for readers, cuts in begun), (last, None)]
        for number, (readers, n_taken) in enumerate(runs):
            if number and samples_per_rank and readers[0] != runs[number - 1][0][0]:
                n_again += readers[0] - 1
            given_now, states = run(forty, options, readers, states, n_taken)
            came += merged(given_now)
            if samples_per_rank:  # else DistributedDataParallel waits for ever
                sizes = [len(given_now[reader]) for reader in sorted(given_now)]
                assert sizes == sizes[: readers[1]] * readers[0]
        assert not expected - came
        assert (came - expected).total() <= n_again
        assert (came - expected).keys() <= expected.keys()

    @pytest.mark.parametrize("options", MODES, ids=str)
    @pytest.mark.parametrize("last", [(2, 1), (2, 3), (1, 2), (3, 2)])
    def test_nothing_is_decoded_that_was_given(self, forty, options, last, monkeypatch):
        begun, states = run(forty, options, (2, 2), n_taken=lambda worker: 4 + worker)
        decode, decoded = module.decode, []
        monkeypatch.setattr(module, "decode", lambda *data, **key: decoded.append(1) or decode(*data, **key))
        rest, _ = run(forty, options, last, states)
        assert len(decoded) == merged(rest).total()
        assert merged(rest).total() < 66 - merged(begun).total() + last[0]

    @pytest.mark.parametrize("options", MODES, ids=str)
    def test_the_same_readers_go_on_in_the_same_order(self, forty, options):
        states = None
        for readers in [(2, 3), (3, 1)]:  # the second time after a change
            whole, _ = run(forty, options, readers, states)
            begun, states_then = run(forty, options, readers, states, lambda worker: 2 + worker)
            rest, _ = run(forty, options, readers, states_then[::-1])
            assert {reader: taken + rest[reader] for reader, taken in begun.items()} == whole
            states = states_then

    def test_a_rank_needs_its_own_workers_states_alone(self, forty, monkeypatch):
        _, states = run(forty, {}, (2, 2), n_taken=lambda worker: 4)
        at(monkeypatch, 1, 2)
        dataset = read_shards(forty)
        dataset.load_state_dict([state for state in states if state["place"][0] == 1])
        whole, _ = run(forty, {}, (2, 2))
        assert numbers(dataset) == whole[1, 0][4:] + whole[1, 1][4:]

    @pytest.mark.parametrize("world_size", [1, 3])
    def test_the_next_epoch_begins_where_this_one_would_have_ended(self, forty, world_size, monkeypatch):
        options = {"samples_per_rank": 10}
        _, states = run(forty, options, (2, 1), n_taken=lambda worker: 4)  # epoch 2 is of samples 40 to 60
        came = []
        for rank in range(world_size):
            at(monkeypatch, rank, world_size)
            dataset = read_shards(forty, **options)
            dataset.load_state_dict(states)
            list(dataset)
            dataset.set_epoch(EPOCH + 1)
            came += numbers(dataset)
        assert came == [(20 + number) % 40 for number in range(10 * world_size)]

    def test_sixteen_workers_states_are_small(self, forty):
        _, states = run(forty, MODES[-1], (1, 16), n_taken=lambda worker: 1)
        _, others = run(forty, MODES[-1], (1, 3), states, lambda worker: 1)
        for saved in (states, others):
            assert len(json.dumps(saved)) < 10_000


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


class TestSkips:
    @pytest.mark.parametrize("last", [1, 3])
    @pytest.mark.parametrize("n_taken", [1, 3, 6])
    @pytest.mark.parametrize("samples_per_rank", [None, 20])
    def test_what_is_skipped_is_left_out_or_made_up_for(self, damaged, last, n_taken, samples_per_rank):
        options = {"samples_per_rank": samples_per_rank, "on_error": "skip", **MIXED}
        begun, states = run(damaged, options, (1, 2), n_taken=lambda worker: n_taken)
        rest, _ = run(damaged, options, (1, last), states)
        came = merged(begun) + merged(rest)
        assert came.keys() == set(range(20)) - {3, 11}
        assert came.total() == (samples_per_rank or 18)

    def test_a_part_of_which_none_can_be_read(self, tmp_path):
        members = {f"{number}.{suffix}": data for number in range(4)
                   for suffix, data in (("cls", b"0"), ("png", PICTURE[: None if number == 0 else 40]))}  # fmt: skip
        options = {"samples_per_rank": 4, "on_error": "skip"}
        tar = make_tar(tmp_path / "x.tar", members)
        _, states = run(tar, options, (1, 1), n_taken=lambda worker: 1)
        rest, _ = run(tar, options, (1, 2), states)
        assert merged(rest) == {0: 3}


@pytest.mark.slow
@pytest.mark.parametrize("options", [MODES[3]], ids=str)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
class TestStatefulDataLoader:
    def load(self, root, options, num_workers, state=None, **more):
        dataset = read_shards(root, **options)
        dataset.set_epoch(EPOCH)
        if state:
            dataset.load_state_dict(state)
        method = {"multiprocessing_context": "fork"} if num_workers else {}
        return StatefulDataLoader(dataset, batch_size=4, num_workers=num_workers, **method, **more)

    @pytest.mark.parametrize(
        ("before", "after", "n_batches"),
        [(2, 3, 3), (2, 0, 3), *(pytest.param(*case, marks=EXHAUSTIVE) for case in REST)],
    )
    def test_another_number_of_workers(self, forty, options, before, after, n_batches):
        whole = numbers_of(self.load(forty, options, before))
        loader = self.load(forty, options, before)
        came = numbers_of(itertools.islice(loader, n_batches)) if n_batches else []
        state = pickle.loads(pickle.dumps(loader.state_dict()))
        loader = self.load(forty, options, after, state)
        came += numbers_of(itertools.islice(loader, 2))
        came += numbers_of(self.load(forty, options, 1, json.loads(json.dumps(loader.state_dict()))))
        if n_batches:
            assert sorted(came) == sorted(whole)
        else:  # from the beginning, in the order of the new ones
            assert len(came) == len(whole)

    def test_a_later_pass_is_whole(self, forty, options):
        begun = self.load(forty, options, 2)
        came = numbers_of(itertools.islice(begun, 3))
        loader = self.load(forty, options, 3, begun.state_dict())
        whole = Counter(numbers_of(self.load(forty, options, 2)))
        assert Counter(came + numbers_of(loader)) == whole
        assert Counter(numbers_of(loader)) == whole
        plain = DataLoader(loader.dataset, batch_size=4)
        assert Counter(numbers_of(plain)) == whole

    def test_torchdata_itself_goes_on_with_as_many(self, forty, options):
        begun = self.load(forty, options, 2)
        numbers_of(itertools.islice(begun, 3))
        loader, state = self.load(forty, options, 3, begun.state_dict()), begun.state_dict()
        expected = numbers_of(loader)
        loader = self.load(forty, options, 3, state)
        came = numbers_of(itertools.islice(loader, 2))
        resumed = self.load(forty, options, 3)
        resumed.load_state_dict(loader.state_dict())
        assert came + numbers_of(resumed) == expected

    def test_an_old_snapshot_is_refused(self, forty, options):
        loader = self.load(forty, options, 2, snapshot_every_n_steps=4)
        numbers_of(itertools.islice(loader, 6))
        with pytest.raises(ValueError, match=r"took its snapshot 2 batches ago.*snapshot_every_n_steps=1, or load"):
            self.load(forty, options, 3, loader.state_dict())


def numbers_of(batches) -> list[int]:
    return [int(image[0, 0, 0]) for images, _ in batches for image in images]


class TestStatesThatDoNotFit:
    @pytest.mark.parametrize(
        ("options", "change", "said"),
        [
            ({"seed": 1}, {}, "of another order of samples: shards, shuffle"),
            ({"shuffle": 2}, {}, "of another order"),
            ({"samples_per_rank": 3}, {}, "of another order"),
            ({}, {"version": 1}, "the state has version 1, this labkit reads 2: begin the epoch anew"),
            ({}, {"place": [0, 1]}, r"rank, world size, worker and number of workers, not \[0, 1\]"),
            ({}, {"epoch": "1"}, "not a state"),
            ({}, {"streams": [[0, 0, 1]]}, "not a state of read_shards, which holds version, epoch"),
            ({}, {"began_with": [1]}, "not a state"),
        ],
    )
    def test_each_is_refused_by_name(self, forty, options, change, said):
        state = read_shards(forty).state_dict() | change
        with pytest.raises(ValueError, match=said):
            read_shards(forty, **options).load_state_dict(state)

    def test_none_and_other_shards(self, forty, tmp_path):
        for state in (None, {}, [None]):
            with pytest.raises(ValueError, match="not a state"):
                read_shards(forty).load_state_dict(state)
        with pytest.raises(ValueError, match=r"there is no state in \[\]: give load_state_dict\(\) what"):
            read_shards(forty).load_state_dict([])
        other = read_shards(numbered(tmp_path / "other", 10, 2))
        with pytest.raises(ValueError, match="of another order"):
            other.load_state_dict(read_shards(forty).state_dict())

    @pytest.mark.parametrize(
        ("kept", "rank", "world_size", "said"),
        [
            (slice(1), 0, 2, "of all workers of its rank, and there is none of worker 1 of 2 on rank 0 of 2; give"),
            (slice(2), 1, 2, "none of worker 0 of 2 on rank 1 of 2 and 1 more; give"),
            (slice(2), 0, 3, "and this is worker 0 of 1 on rank 0 of 3: it goes on with the states of all ranks and"),
            (slice(1, None), 0, 1, "none of worker 0 of 2 on rank 0 of 2; give"),
        ],
    )
    def test_what_is_missing_is_named(self, forty, monkeypatch, kept, rank, world_size, said):
        _, states = run(forty, {}, (2, 2), n_taken=lambda worker: 1 - worker)
        at(monkeypatch, rank, world_size)
        with pytest.raises(ValueError, match=said):
            read_shards(forty).load_state_dict(states[kept])

    def test_a_worker_that_had_none_yet_does_not_speak_for_the_others(self, forty):
        _, states = run(forty, {}, (1, 2), n_taken=lambda worker: 1 - worker)
        with pytest.raises(ValueError, match="there is none of worker 0 of 2"):
            read_shards(forty).load_state_dict(states[1])

    def test_workers_are_checked_too(self, forty, monkeypatch):
        _, states = run(forty, {}, (2, 1), n_taken=lambda worker: 1)
        at(monkeypatch, 0, 2)
        dataset = read_shards(forty)
        dataset.load_state_dict(states[0])
        at(monkeypatch, 0, 3)
        with pytest.raises(ValueError, match="there is none of worker 0 of 1 on rank 1 of 2"):
            next(iter(dataset))

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"place": [0, 1, 0, 2]}, "two states are of worker 0 of 2 on rank 0 of 1"),
            ({"place": [0, 1, 1, 3]}, r"other numbers of ranks and workers, \(1, 2\) and \(1, 3\); give load"),
            ({"epoch": 3}, "not of one moment: they have other epochs, 2 and 3"),
            ({"start": 7}, "other beginnings of an epoch, 0 and 7"),
            ({"began_with": [1, 3]}, r"other ranks and workers at the epoch's beginning, \(1, 2\) and \(1, 3\)"),
        ],
    )
    def test_states_of_two_moments(self, forty, change, said):
        _, (first, second) = run(forty, {}, (1, 2), n_taken=lambda worker: 1)
        with pytest.raises(ValueError, match=said):
            read_shards(forty).load_state_dict([first, second | change])
