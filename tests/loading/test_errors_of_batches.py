"""A pass goes on after a batch that fails, and leaves out one of which nothing is left, whoever loads it."""

import gc
import json
import weakref

import pytest

import labkit as lk
from labkit.data.partial_jpeg import open_decoder
from labkit.errors import DecodeError
from labkit.loading.rows import BatchBuffers
from tests.loaders import eventually, solid
from tests.memory_store import MemoryStore

N_IMAGES, BATCH_SIZE = 16, 2
KEYS = [f"class/{number:02}.png" for number in range(N_IMAGES)]


def store_without(broken=()):
    return MemoryStore({key: b"text" if number in broken else solid(10 * number) for number, key in enumerate(KEYS)})


def in_workers(num_workers):
    def make(broken=(), on_error="skip"):
        config = lk.LoaderConfig(BATCH_SIZE, num_workers, start_method="fork" if num_workers else None)
        return lk.make_loader(lk.ImageDataset(store_without(broken), on_error=on_error), config, shuffle=True)

    return make


def in_threads(broken=(), on_error="skip"):
    options = {"size": 8, "batch_size": BATCH_SIZE, "num_threads": 2, "on_error": on_error}
    return lk.BatchLoader(store_without(broken), **options)


MAKERS = {"make_loader": in_workers(0), "its workers": in_workers(2), "BatchLoader": in_threads}


def numbers(batch):
    """Which images are in a batch."""
    return [round(red / 10) for red in batch[0][:, 0, 0, 0].tolist()]


def skipped(loader):
    return {skip.key for skip in loader.dataset.skipped}


def without(broken, epoch):
    left = [[number for number in batch if number not in broken] for batch in epoch]
    return [batch for batch in left if batch]


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


@pytest.fixture
def epochs(make):
    """The batches of two epochs, of which nothing is broken."""
    loader = make()
    return [[numbers(batch) for batch in loader] for _ in range(2)]


class TestABatchOfWhichNothingIsLeft:
    def test_is_left_out_of_its_epoch_alone(self, make, epochs):
        broken = {*epochs[0][2], epochs[0][5][0]}
        loader = make(broken)
        assert [[numbers(batch) for batch in loader] for _ in range(2)] == [without(broken, epoch) for epoch in epochs]
        assert skipped(loader) == {KEYS[number] for number in broken}
        assert loader.epoch == 2

    @pytest.mark.parametrize("places", [[2, 3], [6, 7]], ids=["two", "last"])
    def test_counts_in_a_state(self, make, epochs, places):
        broken = {number for place in places for number in epochs[0][place]}
        kept = [place for place in range(len(epochs[0])) if place not in places]
        loader, came = make(broken), []
        for batch in loader:
            came.append(numbers(batch))
            resumed = make()  # of which nothing is broken: what was left out is not read again
            resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
            place = kept[len(came) - 1] + 1
            following = epochs[0][place:] or epochs[1]
            assert numbers(next(iter(resumed))) == following[0]
        assert came == without(broken, epochs[0])
        assert [numbers(batch) for batch in loader] == without(broken, epochs[1])

    def test_is_an_error_where_ranks_need_equally_many(self, make, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "1")
        loader = make()
        first, second = ([numbers(batch) for batch in loader] for _ in range(2))
        broken = {first[1][0], *first[2]}  # what was skipped before is not what is wrong then
        loader = make(broken)
        batches = iter(loader)
        assert [numbers(next(batches)) for _ in range(2)] == without(broken, first[:2])
        with pytest.raises(lk.DecodeError, match=rf"all 2 images .* skipped, the first: .*{KEYS[first[2][0]]}"):
            next(batches)
        assert [numbers(batch) for batch in batches] == first[3:]
        assert [numbers(batch) for batch in loader] == without(broken, second)

    @pytest.mark.parametrize("n_epochs", [1, 2])
    def test_is_an_error_if_all_are_such(self, make, n_epochs):
        loader = make(range(N_IMAGES))
        for epoch in range(n_epochs):
            with pytest.raises(lk.DecodeError, match=r"no batch of the epoch is left: all 2 images .* were skipped"):
                next(iter(loader))
            assert loader.epoch == epoch + 1
        assert skipped(loader) == {*KEYS}


def taken(batches):
    """All batches that come, and what the others raise."""
    came, failed = [], []
    while True:
        try:
            came.append(numbers(next(batches)))
        except lk.DecodeError as error:
            failed.append(str(error))
        except StopIteration:
            return came, failed


def test_a_pass_goes_on_behind_each_batch_that_fails(make, epochs):
    places = 0, 3, 7
    broken = [epochs[0][place][place % 2] for place in places]
    loader = make(broken, "raise")
    came, failed = taken(iter(loader))
    assert came == [batch for place, batch in enumerate(epochs[0]) if place not in places]
    assert [KEYS[number] in said for number, said in zip(broken, failed, strict=True)] == [True] * 3
    came, failed = taken(iter(loader))
    assert came == [batch for batch in epochs[1] if not {*batch} & {*broken}]
    assert len(came) + len(failed) == len(loader)


@pytest.mark.parametrize("reads_in_flight", [None, 2])
@pytest.mark.parametrize("fails", ["a file", "a transform"])
def test_memory_of_a_batch_that_failed_is_free_at_once(pictures, reads_in_flight, fails, monkeypatch):
    """Without Python's collector: no circle of an error and its traceback holds it."""
    files = {key: b"not an image" if fails == "a file" else pictures.read(key) for key in pictures.keys()}  # noqa: SIM118
    transform = refuse if fails == "a transform" else None
    options = {"size": 16, "batch_size": 4, "reads_in_flight": reads_in_flight, "transform": transform}
    loader, lent, take = lk.BatchLoader(MemoryStore(files), **options), [], BatchBuffers.take

    def noting(buffers, n_bytes):
        memory, images = take(buffers, n_bytes)
        lent.append(weakref.ref(memory))
        return memory, images

    monkeypatch.setattr(BatchBuffers, "take", noting)
    gc.disable()
    try:
        iterator = iter(loader)
        for _ in range(3):
            with pytest.raises((DecodeError, RuntimeError)):
                next(iterator)
        assert len(list(iterator)) == 0
        assert len(lent) == 3
        assert eventually(lambda: not any(reference() is not None for reference in lent))
    finally:
        gc.enable()


def refuse(image):
    raise RuntimeError("refused")


refuse.draws_globally = False


def test_evaluation_refuses_damage_below_what_it_sees_in_each_epoch(first_photos, monkeypatch):
    """As a data set that decodes whole photos does; a sound one is decoded to its end once."""
    photos = lk.FolderStore(first_photos(1))
    whole = photos.read(photos.keys()[0])
    cut = whole[: int(len(whole) * 0.97)] + b"\xff\xd9"
    store = MemoryStore({"a/cut.jpg": cut, "a/whole.jpg": whole})
    with pytest.raises(DecodeError):
        lk.decode(cut)
    ends, decoder = [], type(open_decoder())
    decode = decoder.decode

    def noting(own, data, box, *more, **how):
        ends.append((data, box[0] + box[2]))
        return decode(own, data, box, *more, **how)

    monkeypatch.setattr(decoder, "decode", noting)
    loader = lk.BatchLoader(store, train=False, size=100, resize=256, on_error="skip", return_keys=True, num_threads=1)
    for _ in range(3):
        [(_, _, keys)] = list(loader)
        assert keys == ["a/whole.jpg"]
    height = lk.decode(whole).shape[1]
    assert [end == height for data, end in ends if data == whole] == [True, False, False]
    assert [end == height for data, end in ends if data == cut] == [True, True, True]
