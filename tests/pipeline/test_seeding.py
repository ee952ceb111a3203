"""Every random draw follows from (seed, epoch, index): across workers, start methods, libraries, epochs and reruns."""

import functools
import itertools
import random
import sys
import threading
import time

import albumentations as A
import cloudpickle
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import labkit as lk
from labkit import course
from labkit.loading.seeding import derived_seed, find_generators
from labkit.util.process import Lazy

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spawned workers cannot import a test file

PICTURE = np.random.default_rng(0).integers(0, 256, (12, 12, 3), dtype=np.uint8)
CONTINUOUS = {"brightness_limit": 0.5, "contrast_limit": 0.5, "p": 1}


def compose(*transforms, **settings) -> A.Compose:
    return A.Compose(list(transforms) or [A.Affine(rotate=(-90, 90), p=1), A.RandomBrightnessContrast(p=1)], **settings)


class Draws(Dataset):
    """An item is one draw of every library: its name -> tensor."""

    def __init__(self, n_samples: int = 22):
        self._n_samples = n_samples
        self._private = {"generator": np.random.default_rng(1), "mersenne": np.random.RandomState(1)}
        self._python, self._torch = random.Random(1), torch.Generator().manual_seed(1)
        self._other = np.random.Generator(np.random.Philox(1))
        self._compose = compose()

    def __len__(self) -> int:
        return self._n_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        numbers = {
            "random": random.random(),
            "numpy": np.random.random(),
            "numpy generator": self._private["generator"].random(),
            "numpy philox": self._other.random(),
            "numpy mersenne": self._private["mersenne"].random(),
            "private random": self._python.random(),
            "torch": torch.rand(()).item(),
            "torch generator": torch.rand((), generator=self._torch).item(),
        }
        drawn = {name: torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()}
        picture = torch.from_numpy(self._compose(image=PICTURE)["image"].copy())
        return {**drawn, "albumentations": picture, "index": torch.tensor(index)}


def noise(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**batch, "whole batch": torch.rand(3)}


def two_epochs(num_workers: int, *, loader=lk.make_loader, **settings) -> list[list[dict[str, torch.Tensor]]]:
    config = lk.LoaderConfig(batch_size=4, num_workers=num_workers, oversubscribe=True, **{"seed": 7, **settings})
    made = loader(Draws(), config, shuffle=True, batch_transform=noise)
    epochs = [list(made) for _ in range(2)]
    made.close()
    return epochs


def same(one: list, other: list) -> bool:
    return all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )


@pytest.fixture(scope="module")
def expected() -> list[list[dict[str, torch.Tensor]]]:
    """Two epochs in this process."""
    return two_epochs(0)


MODES = [
    (0, None, None),
    *itertools.product((1, 2, 4), ["fork"], [True, False]),
    (2, "forkserver", True), (2, "forkserver", False), (2, "spawn", True), (4, "spawn", True),
]  # fmt: skip


@pytest.mark.parametrize(("num_workers", "start_method", "persistent"), MODES)
def test_bit_identical_batches(expected, num_workers, start_method, persistent):
    random.seed(), np.random.seed(), torch.seed()  # the state of this process is of no consequence
    epochs = two_epochs(num_workers, start_method=start_method, persistent_workers=persistent)
    assert [same(*pair) for pair in zip(epochs, expected, strict=True)] == [True, True]


def column(epoch: list[dict[str, torch.Tensor]], name: str) -> torch.Tensor:
    return torch.cat([batch[name] for batch in epoch])


def test_no_draw_comes_twice(expected):
    for name in expected[0][0].keys() - {"index"}:
        drawn = [row.numpy().tobytes() for epoch in expected for row in column(epoch, name)]
        assert len(set(drawn)) == len(drawn), name


def test_libraries_draw_independently(expected):
    names = expected[0][0].keys() - {"index", "albumentations", "whole batch"}
    drawn = torch.stack([torch.cat([column(epoch, name) for epoch in expected]) for name in sorted(names)])
    apart = torch.corrcoef(drawn) - torch.eye(len(drawn))
    assert apart.abs().max() < 0.7  # 44 draws: five standard errors


def test_shuffled_anew_each_epoch(expected):
    first, second = (column(epoch, "index").tolist() for epoch in expected)
    assert sorted(first) == sorted(second) == list(range(22))
    assert len({tuple(first), tuple(second), tuple(range(22))}) == 3


def test_another_seed_gives_other_batches(expected):
    other = two_epochs(0, seed=8)
    assert not set(column(other[0], "random").tolist()) & set(column(expected[0], "random").tolist())


def test_a_sample_is_the_same_wherever_it_stands(expected):
    """Neither the batch nor the order matters, only (seed, epoch, index)."""
    config = lk.LoaderConfig(batch_size=5, num_workers=0, seed=7)
    in_order = list(lk.make_loader(Draws(), config))
    where = torch.argsort(column(expected[0], "index"))
    for name in expected[0][0].keys() - {"whole batch"}:
        assert torch.equal(column(in_order, name), column(expected[0], name)[where]), name


def test_an_epoch_after_one_left_early_and_a_resumed_one(expected):
    config = lk.LoaderConfig(batch_size=4, num_workers=2, seed=7)
    loader = lk.make_loader(Draws(), config, shuffle=True, batch_transform=noise)
    next(iter(loader))
    assert same(list(loader), expected[1])
    assert loader.epoch == 2
    loader.set_epoch(0)
    assert same(list(loader), expected[0])
    loader.close()


def test_a_batch_as_a_whole_draws_apart_from_its_samples():
    """A sample that draws more, or not at all, leaves MixUp's draws as they are."""
    quiet = [{"index": torch.tensor(index)} for index in range(22)]
    config = lk.LoaderConfig(batch_size=4, num_workers=0)
    one, other = (list(lk.make_loader(dataset, config, batch_transform=noise)) for dataset in (quiet, Draws()))
    assert [batch["whole batch"].tolist() for batch in one] == [batch["whole batch"].tolist() for batch in other]


RNG = np.random.default_rng(3)


class DrawsFromAGlobal(Dataset):
    """As it stands in many notebooks."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return self._drawn()

    def _drawn(self) -> float:
        return RNG.random()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_generator_that_is_a_global_variable(num_workers):
    loader = lk.make_loader(DrawsFromAGlobal(), lk.LoaderConfig(batch_size=2, num_workers=num_workers))
    numbers = torch.cat([torch.cat(list(loader)) for _ in range(2)])
    loader.close()
    again = torch.cat(list(lk.make_loader(DrawsFromAGlobal(), lk.LoaderConfig(batch_size=2, num_workers=0))))
    assert len(set(numbers.tolist())) == 16
    assert torch.equal(numbers[:8], again)


class Made(Dataset):
    """Items are what `make()` returns."""

    def __init__(self, make, n_samples: int = 32):
        self._make, self._n_samples = make, n_samples

    def __len__(self) -> int:
        return self._n_samples

    def __getitem__(self, index: int):
        return self._make()


def pictures(transform: A.Compose, n_samples: int = 32) -> Made:
    """The same picture many times, through a transform."""
    return Made(lambda: torch.from_numpy(transform(image=PICTURE)["image"].copy()), n_samples)


def torch_loader(transform: A.Compose, **settings) -> DataLoader:
    return DataLoader(pictures(transform), batch_size=4, multiprocessing_context="fork", **settings)


def test_repeats_are_found_in_workers_and_across_epochs_of_a_plain_loader():
    """Albumentations' generators are copied into every worker as they are, and anew each epoch."""
    assert course.count_repeats(torch_loader(compose(), num_workers=2)) == 16  # both workers draw the same
    loader = torch_loader(compose(seed=137), num_workers=1)
    assert course.count_repeats(loader) == 0
    assert course.count_repeats(itertools.chain(loader, loader)) == 32


@pytest.mark.parametrize("persistent", [True, False])
def test_no_repeats_in_ours(persistent):
    config = lk.LoaderConfig(batch_size=4, num_workers=2, start_method="fork", persistent_workers=persistent)
    loader = lk.make_loader(pictures(compose(seed=137)), config)
    assert course.count_repeats(itertools.chain(loader, loader)) == 0
    loader.close()


def test_repeats_count_each_later_one():
    one, other = torch.zeros(1, 2), torch.ones(1, 2)
    assert course.count_repeats([one, other, one, torch.cat([one, other])]) == 3
    assert course.count_repeats([(one, 5), [other], {"image": one}]) == 1
    assert course.count_repeats([]) == 0
    transposed = torch.arange(12.0).reshape(2, 2, 3).transpose(1, 2)
    assert course.count_repeats([transposed, transposed.contiguous()]) == 2


FLIPS = [lambda x: x, lambda x: x[:, ::-1], lambda x: x[::-1], lambda x: x[::-1, ::-1]]


def flips_seen(pictures) -> set[int]:
    return {which for picture in pictures for which, flip in enumerate(FLIPS) if np.array_equal(picture, flip(PICTURE))}


def flipping() -> A.Compose:
    return compose(A.HorizontalFlip(0.5), A.VerticalFlip(0.5), seed=137)


def test_albumentations_own_seed_flips_both_or_none():
    """Why its pair of generators is replaced. Should this fail, the quirk is gone, and `_share_generators` may go."""
    transform = flipping()
    assert flips_seen(transform(image=PICTURE)["image"] for _ in range(64)) == {0, 3}


def test_all_four_combinations_of_flips():
    loader = lk.make_loader(pictures(flipping(), 64), lk.LoaderConfig(batch_size=16, num_workers=0))
    assert flips_seen(picture.numpy() for batch in loader for picture in batch) == {0, 1, 2, 3}


def global_state():
    return random.getstate(), [str(part) for part in np.random.get_state()], torch.get_rng_state().tolist()


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, None), (2, True), (2, False)])
def test_global_state_stays_as_it_was(num_workers, persistent):
    config = lk.LoaderConfig(batch_size=4, num_workers=num_workers, persistent_workers=persistent)
    loader = lk.make_loader(Draws(), config, shuffle=True, batch_transform=noise)
    before = global_state()
    for _ in range(2):
        for _ in loader:
            assert global_state() == before
    loader.close()


def test_derived_seeds_differ():
    """Neighbours, swapped numbers, zeros, large and negative ones."""
    numbers = [*itertools.product(range(10), repeat=3), (0,), (0, 0), (1,), (-1, 0, 0), (2**64, 0, 0), (2**127, 0, 0)]
    seeds = [derived_seed(*each) for each in numbers]
    assert len(set(seeds)) == len(seeds)
    assert len({seed & 0xFFFFFFFF for seed in seeds}) == len(seeds)
    assert all(0 <= seed < 2**128 for seed in seeds)
    assert derived_seed(1, 2, 3) == derived_seed(1, 2, 3)


def test_derived_seeds_are_even():
    bits = [sum(derived_seed(0, 0, index) >> bit & 1 for index in range(4000)) for bit in range(128)]
    assert all(abs(count - 2000) < 6 * 4000**0.5 / 2 for count in bits)


class Held:
    def __init__(self, generator):
        self.generator = generator

    def method(self):
        return self.generator


class Slotted(Held):
    __slots__ = ("empty", "in_a_slot")

    def __init__(self, generator):
        self.in_a_slot = generator


def closure(generator):
    return lambda: generator.random()


def default(value):
    def function(argument=value, *, other=value):
        return argument, other

    return function


def wrapped(generator):
    @functools.wraps(print)
    def function():
        return closure(generator)()

    return function


def cycle(generator):
    ring = [Held(generator)]
    ring += [ring, Held(ring)]
    return ring


PLACES = {
    "itself": lambda it: it,
    "an attribute": Held,
    "a slot": Slotted,
    "nested lists": lambda it: [[1, [it]], "text"],
    "a dict in a tuple": lambda it: (1, {"a": {"b": it}}),
    "a closure": closure,
    "a closure in a closure": wrapped,
    "a default": default,
    "a partial": lambda it: functools.partial(print, 1, other=[it]),
    "a bound method": lambda it: Held(it).method,
    "a module": lambda it: torch.nn.Sequential(torch.nn.Identity(), Holding(it)),
    "a cycle": cycle,
    "a subset": lambda it: torch.utils.data.Subset(Held(it), [0]),
}
KINDS = {
    "random": lambda: random.Random(1),
    "generator": lambda: np.random.default_rng(1),
    "mersenne": lambda: np.random.RandomState(1),
    "torch": torch.Generator,
}


class Holding(torch.nn.Module):
    def __init__(self, generator):
        super().__init__()
        self.generator = generator


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_generator_is_found_in(place, kind):
    generator = kind()
    assert find_generators([place(generator)]) == [generator]


def helper():
    return RNG.random()


@pytest.mark.parametrize(
    "root",
    [
        lambda: RNG.random(), lambda: helper(), lambda: [(lambda: RNG)() for _ in range(3)],
        DrawsFromAGlobal(), torch.utils.data.Subset(DrawsFromAGlobal(), [0]),
    ],
)  # fmt: skip
def test_found_in_what_functions_use(root):
    assert find_generators([root]) == [RNG]


def test_found_in_a_class():
    generator = random.Random(1)

    class Holds:
        its_own = generator

        @staticmethod
        def static():
            return RNG

    assert find_generators([Holds()]) == [generator, RNG]
    assert find_generators([[generator, RNG], Holds(), (RNG, generator)]) == [generator, RNG]  # each once, in order


def test_what_cannot_be_seeded_is_left_alone():
    assert find_generators([random.SystemRandom(), threading.Lock(), time, Held, iter([1])]) == []


class Unconnected:
    """As Ray's client is before `ray.init`: asked for anything, it raises, and not AttributeError."""

    def __getattr__(self, name):
        raise RuntimeError("not connected")


class Unlisted(dict):
    """As urllib3's pools are."""

    def values(self):
        raise NotImplementedError


def test_objects_that_answer_no_questions_are_passed_over():
    generator, opened = random.Random(), Lazy(random.Random)
    opened()  # what a store keeps open: connections, of libraries that draw for themselves
    assert find_generators([Held(Unconnected()), [Unlisted(a=1)], Held(opened), generator]) == [generator]


class Annotated(Dataset):
    """Draws from a generator of its own, which stands behind large annotations: 900 entries of 12 boxes."""

    def __init__(self, place):
        self.boxes = [[{"box": (n, k, 1.0, 2.0), "label": str(k)} for k in range(12)] for n in range(900)]
        self.names = [f"{n}.jpg" for n in range(100_000)]
        self.drawn = place(np.random.default_rng(3))

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return self.drawn()


PLACES_BEHIND_MUCH = {
    "an attribute": lambda it: it.random,
    "a closure": lambda it: lambda: it.random(),
    "a list": lambda it: functools.partial(lambda held: held[-1][0].random(), [*range(50_000), [it]]),
    "a dict": lambda it: functools.partial(lambda held: held[-1].random(), dict.fromkeys(range(50_000)) | {-1: it}),
}


@pytest.mark.parametrize("place", PLACES_BEHIND_MUCH.values(), ids=PLACES_BEHIND_MUCH)
def test_a_generator_is_found_however_much_lies_beside_it(place):
    def draws(num_workers):
        config = lk.LoaderConfig(batch_size=8, num_workers=num_workers, start_method="fork" if num_workers else None)
        return torch.cat(list(lk.make_loader(Annotated(place), config))).tolist()

    drawn = draws(2)
    assert len(set(drawn)) == 64
    assert draws(0) == drawn


def test_what_a_batch_draws_is_nobody_elses_stream():
    def with_own_draw(batch):
        return [*batch[0].tolist(), random.random()]

    first, second = random.Random(), random.Random()
    dataset = Made(lambda: torch.tensor([each.random() for each in (first, second, random)], dtype=torch.float64), 1)
    loader = lk.make_loader(dataset, lk.LoaderConfig(1, 0), batch_transform=with_own_draw)
    draws = [draw for _ in range(20) for batch in loader for draw in batch]
    assert len(set(draws)) == len(draws) == 80
