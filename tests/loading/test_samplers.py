"""torch's samplers in the loaders: drawn by the loader's seed and the epoch, resumed exactly, shared among ranks."""

import itertools
import json
import warnings
from collections import Counter
from functools import partial

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import labkit as lk
from tests.loaders import Numbers, indices, loader_of, rows, solid
from tests.memory_store import MemoryStore

WEIGHTS = [1.0] * 10 + [3.0] * 10 + [0.0] * 10
SAMPLERS = {
    "random": lambda **options: RandomSampler(range(30), **options),
    "with replacement": lambda **options: RandomSampler(range(30), replacement=True, num_samples=41, **options),
    "subset": lambda **options: SubsetRandomSampler(range(5, 26), **options),
    "weighted": lambda **options: WeightedRandomSampler(WEIGHTS, 40, **options),
}
every_sampler = pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
every_kind = pytest.mark.parametrize("kind", ["make_loader", "batch sampler", "BatchLoader"])


@pytest.fixture(scope="module")
def store():
    return MemoryStore({f"{number:02}.png": solid(number) for number in range(30)})


def numbers(loader) -> list[int]:
    """The images of a `BatchLoader`'s pass by their color."""
    return [int(image[0, 0, 0]) for images, _ in loader for image in images]


def batches(store, **options):
    return lk.BatchLoader(store, size=16, batch_size=4, classes=[], **options)


def of_kind(kind, store, sampler, **options):
    """A function that makes a loader of a new sampler, and what lists the samples of a pass."""
    if kind == "BatchLoader":
        return partial(batches, store, sampler=sampler, **options), numbers
    if kind == "batch sampler":
        return partial(loader_of, Numbers(30), batch_sampler=BatchSampler(sampler, 4, False), **options), indices
    return partial(loader_of, Numbers(30), 2 * (kind == "workers"), sampler=sampler, **options), indices


class TestThatDrawAsTheLoaderSeedsThem:
    @every_sampler
    @every_kind
    def test_give_the_same_epochs_whatever_torch_was_seeded_with(self, kind, make, store):
        runs = []
        for torchs_seed, seed in ((1, 0), (2, 0), (1, 5)):
            torch.manual_seed(torchs_seed)
            state, sampler = torch.get_rng_state(), make()
            make_loader, listed = of_kind(kind, store, sampler, seed=seed)
            loader = make_loader()
            runs.append([listed(loader) for _ in range(3)])
            assert torch.equal(torch.get_rng_state(), state)
            assert loader.batch_sampler.sampler is sampler
            assert sampler.generator is None
        assert runs[0] == runs[1]
        assert len(set(map(tuple, runs[0] + runs[2]))) == 6

    @every_sampler
    def test_give_foreign_loaders_the_same_epochs(self, make):
        own, made = (loader_of(Numbers(30), sampler=make()) for _ in range(2))
        foreign = DataLoader(made.dataset, batch_sampler=made.batch_sampler)
        assert [rows(foreign) for _ in range(2)] == [rows(own) for _ in range(2)]

    def test_give_what_they_are_for(self):
        counts = Counter(indices(loader_of(Numbers(30), sampler=WeightedRandomSampler(WEIGHTS, 4000), batch_size=500)))
        assert set(counts) == set(range(20))
        assert 2.4 < sum(counts[number] for number in range(10, 20)) / sum(counts[number] for number in range(10)) < 3.6
        assert sorted(indices(loader_of(Numbers(30), sampler=RandomSampler(range(30))))) == list(range(30))
        assert sorted(indices(loader_of(Numbers(30), sampler=SubsetRandomSampler([4, 9, 7])))) == [4, 7, 9]

    @every_sampler
    def test_are_the_same_whatever_torchs_default_device_is(self, make):
        expected = indices(loader_of(Numbers(30), sampler=make()))
        sampler = make()
        torch.set_default_device("meta")
        try:
            found = [
                index for batch in loader_of(Numbers(30), sampler=sampler).batch_sampler for index in batch.plain()
            ]
        finally:
            torch.set_default_device(None)
        assert found == expected

    @every_sampler
    @pytest.mark.parametrize("drop_last", [False, True])
    def test_are_shared_out_among_ranks_without_a_warning(self, make, drop_last, monkeypatch):
        whole = loader_of(Numbers(30), sampler=make())
        expected = [indices(whole) for _ in range(2)]
        found = []
        for rank in range(3):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", "3")
            loader = loader_of(Numbers(30), sampler=make(), drop_last=drop_last)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                epochs = [[batch[:, 0].int().tolist() for batch in loader] for _ in range(2)]
            assert all(len(epoch) == len(loader) for epoch in epochs)
            found.append([list(itertools.chain(*epoch)) for epoch in epochs])
        for number, order in enumerate(expected):
            shares = [share[number] for share in found]
            assert len(set(map(len, shares))) == 1
            dealt = [index for round_ in zip(*shares, strict=True) for index in round_]
            assert dealt == (order + order)[: len(dealt)]
            assert drop_last or set(dealt) == set(order)


class TestWithAGeneratorOfTheirOwn:
    @every_sampler
    @every_kind
    def test_draw_what_they_draw_without_a_loader(self, kind, make, store):
        sampler, oracle = (make(generator=torch.Generator().manual_seed(3)) for _ in range(2))
        make_loader, listed = of_kind(kind, store, sampler)
        loader = make_loader()
        assert [listed(loader) for _ in range(2)] == [list(oracle) for _ in range(2)]


@every_sampler
@pytest.mark.parametrize("kind", ["workers", "BatchLoader"])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("n_taken", [0, 4])
def test_a_resumed_epoch_is_the_rest_of_the_undisturbed_one(make, kind, own, n_taken, store):
    def loader():
        options = {"generator": torch.Generator().manual_seed(3)} if own else {}
        make_loader, listed = of_kind(kind, store, make(**options))
        return make_loader(), listed

    torch.manual_seed(1)
    whole, listed = loader()
    expected = [listed(whole) for _ in range(3)]
    begun, _ = loader()
    listed(begun)
    iterator = iter(begun)
    taken = list(itertools.islice(iterator, n_taken))
    state = json.loads(json.dumps(begun.state_dict()))
    torch.manual_seed(2)
    resumed, _ = loader()
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert [listed(taken) + listed(resumed), listed(resumed)] == expected[1:]


@pytest.mark.parametrize("n_samples", [24, 25, 31])
@pytest.mark.parametrize("drop_samples", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_distributed_sampler_gives_each_rank_as_many_batches(n_samples, drop_samples, drop_last, monkeypatch):
    shares = []
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        sampler = DistributedSampler(range(n_samples), num_replicas=3, rank=rank, drop_last=drop_samples)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loader = loader_of(Numbers(n_samples), sampler=sampler, drop_last=drop_last)
            shares.append([batch[:, 0].int().tolist() for batch in loader])
            assert len(shares[-1]) == len(loader)
    assert len({tuple(map(len, share)) for share in shares}) == 1
    came = Counter(itertools.chain(*itertools.chain(*shares)))
    assert drop_samples or drop_last or came.keys() == set(range(n_samples))
    assert came.total() - len(came) < 3  # at most a round is filled up
