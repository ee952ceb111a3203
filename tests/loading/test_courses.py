"""Any course of a training gives what its epochs hold: takes, looks, errors, saves and loads, against plain lists."""

import contextlib
import functools
import json
from functools import partial

import pytest
from hypothesis import HealthCheck, example, given, settings, strategies

import labkit as lk
from labkit.measure.unchanged import unchanged
from tests.loaders import Numbers, loader_of, red, solid, store_that_reads
from tests.memory_store import MemoryStore

N, FAILED = 12, "an error in place of a batch"


class Broken(Numbers):
    """Some samples raise an error, in each epoch."""

    def __init__(self, bad=()):
        super().__init__(N, self.refuse)
        self.bad = frozenset(bad)

    def refuse(self, index):
        if index in self.bad:
            raise ValueError(f"sample {index} is broken")


class Kind:
    """How to make a loader of which some samples are broken, and what its batches are."""

    lazy = False  # whether an iterator begins with its first batch
    ends_early = True  # whether the last batch of an epoch ends it
    keeps_epoch = False  # whether an epoch that was set is also that of the passes after it

    def make(self, bad):
        raise NotImplementedError

    def content(self, batch):
        """As plain data that can be compared, and the numbers of its samples."""
        raise NotImplementedError

    @functools.lru_cache  # noqa: B019 - for as long as the tests run
    def epoch(self, number):
        """The batches of an epoch, without errors."""
        loader = self.make(())
        loader.set_epoch(number)
        return [self.content(batch) for batch in loader]

    def expected(self, bad, number):
        return [FAILED if bad & set(indices) else data for data, indices in self.epoch(number)]


class OfNumbers(Kind):
    def __init__(self, num_workers):
        self.options = {"num_workers": num_workers, "start_method": "fork" if num_workers else None}

    def make(self, bad):
        return loader_of(Broken(bad), batch_size=2, seed=1, shuffle=True, **self.options)

    def content(self, batch):
        return batch.tolist(), batch[:, 0].int().tolist()


class OfPictures(Kind):
    def __init__(self, pictures):
        self.pictures = pictures

    def make(self, bad):
        def read(key):
            if self.number(key) in bad:
                raise OSError(f"{key} is broken")
            return self.pictures.read(key)

        store = store_that_reads(self.pictures, read)
        return lk.BatchLoader(store, size=16, batch_size=2, num_threads=2, seed=1, return_keys=True)

    def number(self, key):
        return int(key[-6:-4])

    def content(self, batch):
        images, labels, keys = batch
        return (images.flatten().tolist(), labels.tolist(), keys), [*map(self.number, keys)]


class Prefetched(Kind):
    lazy = True

    def __init__(self, kind, depth):
        self.kind, self.depth, self.content = kind, depth, kind.content

    def make(self, bad):
        return lk.CUDAPrefetcher(self.kind.make(bad), "cpu", depth=self.depth)


class OfShards(Kind):
    ends_early, keeps_epoch = False, True

    def __init__(self, folder):
        self.folder = folder

    @functools.lru_cache  # noqa: B019
    def write(self, bad):
        files = {f"all/{n:02}.png": b"\x89PNG, broken" if n in bad else solid(n) for n in range(N)}
        root = self.folder / ("set" + "-".join(map(str, sorted(bad))))
        return lk.write_shards(MemoryStore(files), root, max_count=5, engine="threads", progress=False)

    def make(self, bad):
        root = self.write(frozenset(bad))
        return lk.read_shards(root, shuffle=True, shuffle_buffer=4, shuffle_initial=2, transform=red)

    def content(self, batch):
        return batch[0], [batch[0]]


class Course:
    """A training on a loader: whatever else happens, each batch must be that of its list."""

    def __init__(self, kind, bad):
        self.kind, self.expected = kind, functools.cache(partial(kind.expected, frozenset(bad)))
        self.make = partial(kind.make, frozenset(bad))
        self.loader, self.running, self.given_by = self.make(), None, None
        self.epoch, self.n_taken = 0, 0  # where the training is
        self.left = None  # where it left its last epoch, until it takes from the next one
        self.looks, self.strays = [], []  # kept iterators, each with its epoch and how many were taken
        self.at_look = None  # the look that gave a batch last, if the training has taken none since
        self.state = self.saved = None
        self.loaded = None  # where a state goes on, until a batch is taken
        self.is_fixed = False

    @property
    def has_given(self):
        """Whether the training has taken a batch from its iterator."""
        return self.running is not None and self.given_by is self.running

    @property
    def place(self):
        """What the loader must say: epoch, and number of batches."""
        epoch, n_taken = self.at_look[1:] if self.at_look else (self.epoch, self.n_taken)
        if self.left and not self.at_look and (self.running is None or self.kind.lazy):
            epoch, n_taken = self.left
        if n_taken == len(self.expected(epoch)) and self.kind.ends_early:
            return epoch + 1, 0
        return epoch, n_taken

    def ask(self, iterator, epoch, n_taken):
        """The batch of this number, its error, or the end; whether it was a batch."""
        batches = self.expected(epoch)
        if n_taken == len(batches):
            assert next(iterator, "the end") == "the end"
            return False
        if batches[n_taken] is FAILED:
            with pytest.raises((ValueError, OSError), match=r"broken|cannot decode"):
                next(iterator)
        else:
            assert self.kind.content(next(iterator))[0] == batches[n_taken]
        return True

    def take(self):
        self.running = self.running or iter(self.loader)
        self.left = self.at_look = self.loaded = None
        if self.ask(self.running, self.epoch, self.n_taken):
            self.n_taken, self.given_by = self.n_taken + 1, self.running
        else:
            self.leave_epoch()

    def leave_epoch(self):
        self.running, self.given_by, self.n_taken, self.at_look = None, None, 0, None
        self.epoch += not self.is_fixed

    def leave(self):
        if self.has_given and not self.at_look:
            self.left = self.epoch, self.n_taken
            self.leave_epoch()

    def look(self, keep=False):
        """In the middle of an epoch, at the first batch of another one."""
        if not self.has_given:
            return
        iterator = iter(self.loader)
        with contextlib.suppress(ValueError, OSError):
            first = self.kind.content(next(iterator))[0]
            epoch = iterator.state_dict()["epoch"]
            assert first == self.expected(epoch)[0]
            assert epoch == self.epoch if self.is_fixed else epoch > self.epoch
            if keep:
                self.at_look = [iterator, epoch, 1]
                self.looks.append(self.at_look)

    def keep(self):
        self.look(keep=True)

    def look_on(self):
        if self.at_look and self.at_look[2] < len(self.expected(self.at_look[1])):
            self.ask(*self.at_look)
            self.at_look[2] += 1

    def forget_looks(self):
        """One that was left gives its place back to the training."""
        if self.running:
            self.looks, self.at_look = [], None

    def stray(self):
        """An iterator from before a state was loaded goes on by itself."""
        if self.strays:
            if self.ask(*self.strays[-1]):
                self.strays[-1][2] += 1
            else:
                self.strays.pop()

    def save(self):
        self.state, self.saved = json.loads(json.dumps(self.loader.state_dict())), self.place
        n_given = self.state.get("n_batches", self.state.get("n_read"))
        assert (self.state["epoch"], n_given) == self.place
        if self.has_given and not self.at_look:
            assert json.loads(json.dumps(self.running.state_dict())) == self.state

    def load(self):
        """In another loader, as after a kill."""
        if self.state:
            self.loader, self.running, self.given_by, self.looks, self.strays = self.make(), None, None, [], []
            self.is_fixed = False
            self.load_here()

    def load_here(self):
        """In the same loader: an iterator that has given nothing goes on there, and others by themselves."""
        if self.state:
            if self.has_given:
                self.strays.append([self.running, self.epoch, self.n_taken])
                self.running = self.given_by = None
            self.loader.load_state_dict(self.state)
            (self.epoch, self.n_taken), self.left, self.at_look, self.loaded = self.saved, None, None, self.saved
            self.save()

    def begin(self):
        """An iterator that has given nothing yet."""
        self.running = self.running or iter(self.loader)

    def set(self):
        """Also for an iterator that has given nothing yet; setting the epoch of a loaded state keeps its place."""
        if self.has_given:
            self.running = self.given_by = None
        self.looks, self.strays = [], []
        self.loader.set_epoch(3)
        self.is_fixed = self.kind.keeps_epoch
        self.epoch, self.n_taken = 3, self.loaded[1] if self.loaded and self.loaded[0] == 3 else 0
        self.left = self.at_look = None

    def measure(self):
        """What `compare`, `diagnose` and `tune` do around a measurement leaves no trace, wherever the training is."""
        with unchanged(self.loader):
            iterator = iter(self.loader)
            for _ in range(3):
                with contextlib.suppress(ValueError, OSError):
                    next(iterator, "the end")
            iterator.close()

    acts = (
        "take", "take", "take", "leave", "look", "keep", "look_on", "forget_looks", "stray", "save", "load",
        "load_here", "begin", "set", "measure",
    )  # fmt: skip


def check(kind, acts, bad):
    course = Course(kind, bad)
    for act in acts:
        getattr(course, act)()


courses = given(
    acts=strategies.lists(strategies.sampled_from(Course.acts), max_size=30),
    bad=strategies.one_of(strategies.just(()), strategies.lists(strategies.integers(0, N - 1), max_size=3)),
)
some = partial(settings, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@some(max_examples=60)
@courses
def test_of_make_loader(acts, bad):
    check(OF_NUMBERS, acts, bad)


@some(max_examples=8)
@courses
def test_of_make_loader_with_workers(acts, bad):
    check(WITH_WORKERS, acts, bad)


@pytest.fixture(scope="module")
def of_pictures(pictures):
    return OfPictures(pictures)


@some(max_examples=30)
@courses
def test_of_batch_loader(of_pictures, acts, bad):
    check(of_pictures, acts, bad)


@some(max_examples=30)
@courses
def test_of_a_prefetcher(acts, bad):
    check(PREFETCHED, acts, bad)


@some(max_examples=8)
@courses
@example(acts=["take"] * 4 + ["save", "load", "measure"], bad=())  # which has two batches left
def test_of_a_prefetcher_of_batch_loader(of_pictures, acts, bad):
    check(prefetched_pictures(of_pictures), acts, bad)


@some(max_examples=30)
@courses
def test_of_shards(of_shards, acts, bad):
    check(of_shards, acts, bad)


@pytest.fixture(scope="module")
def of_shards(tmp_path_factory):
    return OfShards(tmp_path_factory.mktemp("shards"))


OF_NUMBERS, WITH_WORKERS = OfNumbers(0), OfNumbers(2)
PREFETCHED = Prefetched(OF_NUMBERS, depth=3)
prefetched_pictures = functools.cache(partial(Prefetched, depth=1))
