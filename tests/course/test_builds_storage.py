"""Exercises on storage: other right answers pass, and each classic mistake is called by its name."""

import io
import itertools
import random
import tarfile

import numpy as np
import pytest
from PIL import Image

from labkit import course


def by_tarfile(mode="r:", place=lambda member: (member.offset_data, member.size)):
    def index(path):
        with tarfile.open(path, mode) as tar:
            return {member.name: place(member) for member in tar}

    return index


def read_at(file, place):
    file.seek(place)
    return file.read(512)


def by_headers(block_bytes, *, long_names=True):
    """Walks through the headers, whose next one begins at a multiple of `block_bytes` after a file's bytes."""

    def index(path):
        found, at, long_name = {}, 0, b""
        with open(path, "rb") as file:
            while (header := read_at(file, at)).strip(b"\0"):
                if header[257:262] != b"ustar":
                    raise tarfile.ReadError("no header of a tar")
                size = int(header[124:135], 8)
                if long_names and header[156:157] == b"L":  # what follows is the name of the next file
                    long_name = read_at(file, at + 512)[:size]
                else:
                    found[(long_name or header[:100]).rstrip(b"\0").decode()] = at + 512, size
                    long_name = b""
                at += 512 + -(-size // block_bytes) * block_bytes
        return found

    return index


def keeps_the_first(path):
    with tarfile.open(path, "r:") as tar:
        return {member.name: (member.offset_data, member.size) for member in reversed(tar.getmembers())}


@pytest.mark.parametrize(
    ("index", "told"),
    [
        (by_tarfile(place=lambda m: (m.offset, m.size)), "there its header begins; the bytes follow 512 later"),
        (by_tarfile(place=lambda m: (m.size, m.offset_data)), "(offset, size) was asked for"),
        (by_tarfile(place=lambda m: (m.offset_data, -(-m.size // 512) * 512)), "a file's own size counts"),
        (by_tarfile(place=lambda m: (m.offset_data, m.size + 1)), "(512, 1024) is right"),
        (by_tarfile("r"), "a compressed tar was indexed"),
        (by_headers(1), "the answer raised ReadError: no header of a tar"),
        (lambda path: list(by_tarfile()(path).items()), "a list is no dictionary of name -> (offset, size)"),
        (lambda path: {}, "the tar holds ['cat/0.jpg', 'dog/0.jpg', 'dog/1.jpg'], the index []"),
        (lambda path: dict.fromkeys(by_tarfile()(path), 512), "'cat/0.jpg' gave 512; (offset, size) was asked"),
        (keeps_the_first, "'cat/0.jpg' is in the tar twice; the last one counts"),
        (by_headers(512, long_names=False), "a name of 124 characters takes blocks of its own"),
    ],
)
def test_a_wrong_index_is_told_what_is_wrong(said, index, told):
    assert told in said(index, course.index_of_tar)


def test_an_index_may_walk_through_the_headers(said):
    assert said(by_headers(512), course.index_of_tar) == "right\n"


def shuffled(samples, buffer, seed, *, rng=None, filled=None, gives_rest=True, moves=True):
    rng, held = rng or random.Random(seed), []
    for sample in samples:
        held.append(sample)
        if len(held) > (buffer if filled is None else filled):
            yield held.pop(rng.randrange(len(held)) if moves else 0)
    while held and gives_rest:
        yield held.pop(rng.randrange(len(held)) if moves else 0)


def with_options(**options):
    return lambda samples, buffer, seed: shuffled(samples, buffer, seed, **options)


def seeds_the_global_one(samples, buffer, seed):
    random.seed(seed)
    yield from shuffled(samples, buffer, seed, rng=random)


def reads_everything(samples, buffer, seed):
    samples = list(samples)
    random.Random(seed).shuffle(samples)
    yield from samples


def in_chunks(samples, buffer, seed):
    """Fills the buffer, empties it, and fills it again."""
    held, rng = [], random.Random(seed)
    for sample in samples:
        held.append(sample)
        if len(held) == buffer:
            rng.shuffle(held)
            yield from held
            held = []
    rng.shuffle(held)
    yield from held


def replaces(samples, buffer, seed, *, new_generators=False):
    """Fills the buffer by `next`, and puts each new sample in the place of one that leaves."""
    rng, held = random.Random(seed), [next(samples) for _ in range(buffer)]
    for sample in samples:
        place = (random.Random(seed) if new_generators else rng).randrange(buffer)
        yield held[place]
        held[place] = sample
    rng.shuffle(held)
    yield from held


def draws_before_it_takes(samples, buffer, seed):
    """Holds `buffer` samples, of which one leaves before the next one is taken."""
    samples, rng = iter(samples), random.Random(seed)
    held = list(itertools.islice(samples, buffer))
    while held:
        yield held.pop(rng.randrange(len(held)))
        held.extend(itertools.islice(samples, 1))


def leaves_the_rest_in_order(samples, buffer, seed):
    rng, held = random.Random(seed), []
    for sample in samples:
        if len(held) == buffer:
            yield held.pop(rng.randrange(buffer))
        held.append(sample)
    yield from held


def draws_by_numpy(samples, buffer, seed):
    return shuffled(samples, buffer, seed, rng=type("Draws", (), {"randrange": staticmethod(np.random.randint)}))


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (with_options(gives_rest=False), "40 of 400 samples were lost: what is in the buffer at the end"),
        (with_options(filled=1), "the buffer of 40 samples never held more than 2: fill it first"),
        (with_options(filled=80), "81 samples were held at a time, with a buffer of 40"),
        (seeds_the_global_one, "draws from a global generator"),
        (with_options(rng=random), "draws from a global generator"),
        (draws_by_numpy, "draws from a global generator"),
        (reads_everything, "all 400 samples were read before the first one came"),
        (lambda *given: list(shuffled(*given)), "all 400 samples were read before the first one came"),
        (with_options(moves=False), "the order is that of the stream"),
        (with_options(rng=random.Random(0)), "the same seed gave another order"),
        (lambda samples, buffer, seed: shuffled(samples, buffer, 0), "seeds 0 and 1 gave the same order"),
        (lambda samples, *given: (s for s in shuffled(samples, *given) for _ in range(2)), "came twice"),
        (lambda *given: iter(()), "400 of 400 samples were lost"),
        (lambda *given: replaces(*given, new_generators=True), "each draw takes the same place: make the generator"),
        (replaces, "the answer raised RuntimeError: generator raised StopIteration"),
        (leaves_the_rest_in_order, "came in its own order: what is held at the end has to be shuffled too"),
        (in_chunks, "only 1 of 40 samples were held before the stream ended"),
    ],
)
def test_a_wrong_buffer_is_told_what_is_wrong(said, answer, told):
    assert told in said(answer, course.shuffle_buffer)


@pytest.mark.parametrize("answer", [shuffled, draws_before_it_takes])
def test_a_buffer_may_draw_before_or_after_it_takes_the_next_sample(said, answer):
    assert said(answer, course.shuffle_buffer) == "right\n"


def depth_m(png, *, mode=None, scale=lambda millimeters: millimeters / 1000, valid=lambda depth: depth > 0):
    image = Image.open(io.BytesIO(png))
    depth = np.asarray(image.convert(mode) if mode else image)
    return scale(depth), valid(depth)


def depths(**options):
    return lambda png: depth_m(png, **options)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (depths(mode="L"), "different depths: the PNG has 16 bits and was read with fewer"),
        (depths(scale=lambda depth: depth // 1000), "different depths: the PNG has 16 bits and was read with fewer"),
        (depths(scale=lambda depth: depth / 10), " mm came as "),
        (depths(scale=lambda depth: (depth / 1000).astype(np.float16)), "float16 is too coarse"),
        (depths(scale=lambda depth: depth.astype(np.int16) / 1000), "int16 ends at 32,767"),
        (
            depths(valid=lambda depth: depth >= 0),
            "pixels of 0 are valid in the mask, but 0 says that the depth is unknown",
        ),
        (depths(valid=lambda depth: depth > 10_000), "pixels of known depth are not valid in the mask"),
        (depths(valid=lambda depth: (depth > 0).astype(int)), "the mask is int64; bool was asked for"),
        (depths(valid=lambda depth: (depth > 0)[:, :5]), "the mask has shape (48, 5); the picture has (48, 64)"),
        (lambda png: depth_m(png)[0], "a pair was asked for"),
    ],
)
def test_a_wrong_depth_is_told_what_is_wrong(said, answer, told):
    assert told in said(answer, course.depth_in_meters)


def test_unknown_pixels_may_hold_anything_that_is_masked(said):
    assert said(depths(scale=lambda d: np.where(d, d / 1000, np.nan)), course.depth_in_meters) == "right\n"
