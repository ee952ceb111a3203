"""Every random draw follows from (seed, epoch, index): across workers, start methods, libraries, epochs and reruns."""

import functools
import itertools
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence

import albumentations as A
import cloudpickle
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

import labkit as lk
from labkit.loading.seeding import derived_seed, find_generators, number_of
from labkit.util.process import Lazy
from tests.loaders import Numbers, loader_of, rows, same

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spawned workers cannot import a test file

PICTURE = np.random.default_rng(0).integers(0, 256, (12, 12, 3), dtype=np.uint8)


def compose(*transforms, **settings) -> A.Compose:
    return A.Compose(list(transforms) or [A.Affine(rotate=(-90, 90), p=1), A.RandomBrightnessContrast(p=1)], **settings)


class Draws(Dataset):
    """An item is one draw of every library: its name -> tensor."""

    def __init__(self):
        self._private = {"generator": np.random.default_rng(1), "mersenne": np.random.RandomState(1)}
        self._python, self._torch = random.Random(1), torch.Generator().manual_seed(1)
        self._other = np.random.Generator(np.random.Philox(1))
        self._compose = compose(seed=137)

    def __len__(self) -> int:
        return 22

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


def draws_loader(num_workers: int = 0, **options):
    return loader_of(Draws(), num_workers, **{"seed": 7, "shuffle": True, "batch_transform": noise, **options})


@pytest.fixture(scope="module")
def expected() -> list[list[dict[str, torch.Tensor]]]:
    """Two epochs in this process."""
    loader = draws_loader()
    return [list(loader) for _ in range(2)]


def column(epoch: list[dict[str, torch.Tensor]], name: str) -> torch.Tensor:
    return torch.cat([batch[name] for batch in epoch])


def global_state():
    return random.getstate(), [str(part) for part in np.random.get_state()], torch.get_rng_state().tolist()


class TestDraws:
    @pytest.mark.parametrize(("num_workers", "start_method", "persistent"), [
        (0, None, None), (1, "fork", True), (4, "fork", False), (2, "forkserver", True), (2, "spawn", True),
    ])  # fmt: skip
    def test_are_bit_identical_and_leave_the_global_state(self, expected, num_workers, start_method, persistent):
        random.seed(), np.random.seed(), torch.seed()  # the state of this process is of no consequence
        before = global_state()
        loader = draws_loader(num_workers, start_method=start_method, persistent_workers=persistent)
        for epoch in range(2):
            for number, batch in enumerate(loader):
                assert same(batch, expected[epoch][number])
                assert global_state() == before
            assert number == 5
        loader.close()

    def test_come_never_twice(self, expected):
        for name in expected[0][0].keys() - {"index"}:
            drawn = [row.numpy().tobytes() for epoch in expected for row in column(epoch, name)]
            assert len(set(drawn)) == len(drawn), name
        other = list(draws_loader(seed=8))
        assert not set(column(other, "random").tolist()) & set(column(expected[0], "random").tolist())

    def test_of_the_order_are_others_in_each_epoch(self, expected):
        first, second = (column(epoch, "index").tolist() for epoch in expected)
        assert sorted(first) == sorted(second) == list(range(22))
        assert len({tuple(first), tuple(second), tuple(range(22))}) == 3

    def test_of_a_sample_are_the_same_wherever_it_stands(self, expected):
        """Neither the batch nor the order matters, only (seed, epoch, index)."""
        in_order = list(draws_loader(batch_size=5, shuffle=False))
        where = torch.argsort(column(expected[0], "index"))
        for name in expected[0][0].keys() - {"whole batch"}:
            assert torch.equal(column(in_order, name), column(expected[0], name)[where]), name

    def test_of_a_subset_are_those_of_its_data_set(self):
        """Whichever samples stand in a batch: `Subset` fetches a whole batch by one call."""
        dataset, whole = Numbers(), rows(loader_of())
        for batch_size in (3, 4):
            assert rows(loader_of(Subset(dataset, range(12)), batch_size=batch_size)) == whole

    def test_of_a_batch_as_a_whole_are_apart_from_its_samples(self):
        """A sample that draws more, or not at all, leaves MixUp's draws as they are."""
        quiet = loader_of([{"index": torch.tensor(index)} for index in range(22)], seed=7, batch_transform=noise)
        assert same([batch["whole batch"] for batch in quiet],
                    [batch["whole batch"] for batch in draws_loader(shuffle=False)])  # fmt: skip

    def test_of_a_batch_are_nobody_elses_stream(self):
        def with_own_draw(batch):
            return [*batch[0].tolist(), random.random()]

        generators = random.Random(), random.Random(), random
        dataset = Made(lambda: torch.tensor([each.random() for each in generators], dtype=torch.float64), 1)
        loader = loader_of(dataset, batch_transform=with_own_draw)
        draws = [draw for _ in range(20) for batch in loader for draw in batch]
        assert len(set(draws)) == len(draws) == 80

    def test_in_a_foreign_loader_leave_the_global_state(self):
        made, before = loader_of(shuffle=True), global_state()
        for _ in DataLoader(made.dataset, batch_sampler=made.batch_sampler, generator=torch.Generator()):
            assert global_state() == before


class TestRepeatedIndices:
    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_are_drawn_for_anew_each_time(self, num_workers):
        loader = loader_of(num_workers=num_workers, sampler=[5] * 16)
        epochs = [rows(loader) for _ in range(2)]
        assert len({row[1:] for epoch in epochs for row in epoch}) == 32
        assert epochs[0][0] == rows(loader_of())[5]  # the first time as always

    def test_give_the_same_for_any_number_of_workers_and_batch_size(self):
        order = [1, 2, 1, 1, 3, 2, 1, 1, 1]
        expected = rows(loader_of(sampler=order))
        assert rows(loader_of(num_workers=2, sampler=order, batch_size=2)) == expected

    @pytest.mark.parametrize("num_threads", [1, 2])
    def test_are_cropped_anew_by_batch_loader(self, pictures, num_threads):
        loader = lk.BatchLoader(pictures, size=32, batch_size=8, sampler=[5] * 16, num_threads=num_threads)
        images = torch.cat([images for images, _ in loader])
        assert len({image.numpy().tobytes() for image in images}) == 16
        [(first, _)] = lk.BatchLoader(pictures, size=32, batch_size=1, sampler=[5])
        assert torch.equal(images[0], first[0])


class Made(Dataset):
    """Items are what `make()` returns."""

    def __init__(self, make, n_samples: int = 32):
        self._make, self._n_samples = make, n_samples

    def __len__(self) -> int:
        return self._n_samples

    def __getitem__(self, index: int):
        return self._make()


def pictures_of(transform: A.Compose, n_samples: int = 32) -> Made:
    """The same picture many times, through a transform."""
    return Made(lambda: torch.from_numpy(transform(image=PICTURE)["image"].copy()), n_samples)


class TestRepeats:
    def test_of_albumentations_flips_are_none(self):
        """Its own seed flips both or none. Should that have changed, `_share_generators` may go."""
        transform = compose(A.HorizontalFlip(0.5), A.VerticalFlip(0.5), seed=137)
        flips = [PICTURE, PICTURE[:, ::-1], PICTURE[::-1], PICTURE[::-1, ::-1]]

        def seen(pictures):
            return {which for picture in pictures for which, flip in enumerate(flips) if np.array_equal(picture, flip)}

        assert seen(transform(image=PICTURE)["image"] for _ in range(64)) == {0, 3}
        loader = loader_of(pictures_of(transform, 64), batch_size=16)
        assert seen(picture.numpy() for batch in loader for picture in batch) == {0, 1, 2, 3}


class Named(Dataset):
    """What a data set may take as an index, and one draw for each."""

    def __init__(self):
        self._generator = np.random.default_rng(1)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index) -> tuple[str, float]:
        return ascii(index), float(self._generator.random())


ODD_INDICES = {
    "strings": ["cat/a.jpg", "dog/é.jpg", "cat/a.jpg", "\udcff"],
    "tuples": [(0, 224), (1, 224), (0, 320), (0, 224)],  # of a number and a size, as multi-scale samplers give
    "NumPy's": [np.str_("a"), np.uint64(2**63), np.int8(-1), (np.int64(0), np.str_("a"))],
    "nested": [("a", (0, None, 1.5), b"\0"), ("a", (0, None, 2.5), b"\0"), "a", b"a"],
    "integers that are no places": [-1, 2**40, -(2**70), -1],
}


@pytest.mark.parametrize("kind", ODD_INDICES)
def test_an_index_may_be_whatever_a_data_set_takes(kind):
    """Each kind of index has draws of its own in each epoch, the same for any number of workers and in every run."""

    def epochs(num_workers: int, sampler=ODD_INDICES[kind]) -> list[list[tuple[str, float]]]:
        config = lk.LoaderConfig(batch_size=2, num_workers=num_workers, start_method="fork" if num_workers else None)
        loader = lk.make_loader(Named(), config, sampler=sampler, collate_fn=list)
        return [[sample for batch in loader for sample in batch] for _ in range(2)]

    first, second = epochs(0)
    given = [int(index) if isinstance(index, np.integer) else index for index in ODD_INDICES[kind]]
    assert [index for index, _ in first] == [index for index, _ in second] == list(map(ascii, given))
    assert len({draw for _, draw in first + second}) == 8  # also where an index comes twice
    assert epochs(2) == epochs(0) == [first, second]
    batches = [ODD_INDICES[kind][:3], ODD_INDICES[kind][3:]]
    in_batches = lk.make_loader(Named(), lk.LoaderConfig(num_workers=0), batch_sampler=batches, collate_fn=list)
    assert [sample for batch in in_batches for sample in batch] == first
    left, resumed = (
        lk.make_loader(Named(), lk.LoaderConfig(2, num_workers=0), sampler=ODD_INDICES[kind], collate_fn=list)
        for _ in range(2)
    )
    next(iter(left))
    resumed.load_state_dict(left.state_dict())
    assert [sample for batch in resumed for sample in batch] == first[2:]


def test_equal_indices_have_equal_numbers_in_every_process():
    """Python's own hashes of texts differ from process to process."""
    assert number_of("cat/a.jpg") == 0x545950A8A5D5D8A26BF03954129F60BB
    assert number_of(np.str_("a")) == number_of("a") != number_of(b"a")
    assert number_of((np.int64(1), "a")) == number_of((1, "a")) != number_of((1, ("a",)))
    assert [number_of(each) for each in (3, np.uint8(3), torch.tensor(3), True)] == [3, 3, 3, 1]


@pytest.mark.parametrize(
    "index", [object(), [0, 1], {"a": 1}, (0, [1]), {1, 2}, np.arange(2)], ids=lambda each: type(each).__name__
)
def test_an_index_that_differs_by_process_is_refused_by_its_type(index):
    kind = type(index[1] if isinstance(index, tuple) else index).__name__
    loader = lk.make_loader(Named(), lk.LoaderConfig(num_workers=0), sampler=[index], collate_fn=list)
    with pytest.raises(TypeError, match=f"a sampler must give integers, strings, bytes, or tuples of these.* a {kind}"):
        next(iter(loader))


def test_derived_seeds_differ_and_are_even():
    """Neighbors, swapped numbers, zeros, large and negative ones."""
    numbers = [*itertools.product(range(10), repeat=3), (0,), (0, 0), (1,), (-1, 0, 0), (2**64, 0, 0), (2**127, 0, 0)]
    seeds = [derived_seed(*each) for each in numbers]
    assert len(set(seeds)) == len({seed & 0xFFFFFFFF for seed in seeds}) == len(seeds)
    assert all(0 <= seed < 2**128 for seed in seeds)
    of_samples = [derived_seed(0, 0, index) for index in range(4000)]
    counts = [sum(seed >> bit & 1 for seed in of_samples) for bit in range(128)]
    assert all(abs(count - 2000) < 6 * 4000**0.5 / 2 for count in counts)


RNG = np.random.default_rng(3)


def helper():
    return RNG.random()


def scaled(image, **_):
    return image * RNG.random()


class DrawsFromAGlobal(Dataset):
    """As it stands in many notebooks."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return self._drawn()

    def _drawn(self) -> float:
        return RNG.random()


class Held:
    __slots__ = ("__dict__", "empty", "in_a_slot")

    def __init__(self, generator=None, in_a_slot=None):
        self.generator, self.in_a_slot = generator, in_a_slot

    def method(self):
        return self.generator


def cycle(generator):
    ring = [Held(generator)]
    ring += [ring, Held(ring)]
    return ring


PLACES = {
    "itself": lambda it: it,
    "an attribute": Held,
    "a slot": lambda it: Held(in_a_slot=it),
    "nested lists": lambda it: [[1, [it]], "text"],
    "a dict in a tuple": lambda it: (1, {"a": {"b": it}}),
    "a closure": lambda it: lambda: it.random(),
    "a closure in a closure": lambda it: functools.wraps(print)(lambda: (lambda: it.random())()),
    "a default": lambda it: lambda argument=it: argument,
    "a default of a keyword": lambda it: lambda *, argument=it: argument,
    "a partial": lambda it: functools.partial(print, 1, other=[it]),
    "a bound method": lambda it: Held(it).method,
    "a module": lambda it: torch.nn.Sequential(vars(module := torch.nn.Identity()).update(generator=it) or module),
    "a cycle": cycle,
    "a subset": lambda it: Subset(Held(it), [0]),
}


class Unconnected:
    """As Ray's client is before `ray.init`: asked for anything, it raises, and not AttributeError."""

    def __getattr__(self, name):
        raise RuntimeError("not connected")


class Unlisted(dict):
    """As urllib3's pools are."""

    def values(self):
        raise NotImplementedError


def reads(kind):
    """What holds a generator, and would have to read a file for each value; and the list of values that were read."""

    def make(generator):
        read = []

        def get(self, key):
            read.append(key)
            raise AssertionError("a value was read")

        names = ("__getitem__", "__iter__", "values", "items", "get", "computed", "__getattr__", "copy")
        body = dict.fromkeys(names, get) | {
            "__len__": lambda self: 500,
            "computed": property(lambda self: get(self, 0)),
        }
        held = type("Reads", (kind,), body)()
        object.__setattr__(held, "held", generator)
        return held, read

    return make


OF_VALUES = {kind.__name__: reads(kind) for kind in (object, dict, list, set, deque, Mapping, Sequence)}


class TestAPrivateGeneratorIsFound:
    @pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
    def test_in(self, place):
        kinds = random.Random(1), np.random.default_rng(1), np.random.RandomState(1), torch.Generator()
        assert [find_generators([place(generator)]) for generator in kinds] == [[generator] for generator in kinds]

    @pytest.mark.parametrize("root", [
        lambda: RNG.random(), lambda: helper(), lambda: [(lambda: RNG)() for _ in range(3)],
        DrawsFromAGlobal(), Subset(DrawsFromAGlobal(), [0]),
    ])  # fmt: skip
    def test_in_what_functions_use(self, root):
        assert find_generators([root]) == [RNG]

    def test_in_what_functions_in_a_pipeline_use(self):
        """After the pair of Albumentations' own, which all of its transforms share."""
        pipeline = compose(A.HorizontalFlip(), A.OneOf([A.Lambda(image=scaled)]))
        assert find_generators([[pipeline]]) == [pipeline.random_generator, pipeline.py_random, RNG]
        flip, one_of = pipeline.transforms
        assert {each.py_random for each in (flip, one_of, *one_of.transforms)} == {pipeline.py_random}

    def test_in_a_class_and_each_once_in_order(self):
        class Holds:
            its_own = generator = random.Random(1)
            static = staticmethod(helper)

        assert find_generators([Holds()]) == [Holds.generator, RNG]
        assert find_generators([[RNG, Holds.generator], Holds(), (RNG,)]) == [RNG, Holds.generator]

    def test_among_what_cannot_be_seeded_or_answers_no_questions(self):
        generator, opened = random.Random(), Lazy(random.Random)
        opened()  # what a store keeps open: connections, of libraries that draw for themselves
        others = [random.SystemRandom(), threading.Lock(), time, Held, iter([1]), Held(Unconnected()), opened]
        assert find_generators([*others, [Unlisted(a=1)], generator]) == [generator]

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_where_it_is_a_global_variable(self, num_workers):
        loader = loader_of(DrawsFromAGlobal(), num_workers, batch_size=2)
        numbers = torch.cat([torch.cat(list(loader)) for _ in range(2)])
        loader.close()
        assert len(set(numbers.tolist())) == 16
        assert torch.equal(numbers[:8], torch.cat(list(loader_of(DrawsFromAGlobal(), batch_size=4))))

    @pytest.mark.parametrize("kind", OF_VALUES, ids=OF_VALUES)
    def test_beside_values_of_which_none_is_read(self, kind):
        generator = random.Random(1)
        held, read = OF_VALUES[kind](generator)
        assert find_generators([Held(held)]) == [generator]
        assert read == []

    def test_however_much_lies_beside_it(self):
        generator = random.Random(1)
        boxes = [[{"box": (n, k, 1.0, 2.0), "label": str(k)} for k in range(12)] for n in range(900)]
        names = [f"{n}.jpg" for n in range(100_000)]
        for place in ([*names, [generator]], dict.fromkeys(names) | {"last": generator}, Held(generator)):
            assert find_generators([Held([boxes, names, place])]) == [generator]
