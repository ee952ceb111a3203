"""A blob as a file."""

import io
import random

from labkit.data.blobs.base import BlobFile, open_buffered

DATA = random.Random(0).randbytes(100_000)


class Memory:
    """A blob in memory that counts what is asked of it, and gives a little at a time where it should."""

    name = "memory"

    def __init__(self):
        self.asked: list[tuple[int, int]] = []

    def fingerprint(self) -> tuple[int, str]:
        return len(DATA), "1"

    def read_at(self, offset: int, size: int) -> bytes:
        self.asked.append((offset, size))
        return DATA[offset : offset + size]


def test_a_remote_file_is_a_file():
    file, oracle, own = open_buffered(Memory()), io.BytesIO(DATA), random.Random(2)
    for _ in range(300):
        if own.random() < 0.5:
            place = own.choice([(own.randrange(120_000), 0), (-own.randrange(len(DATA)), 2)])
            assert file.seek(*place) == oracle.seek(*place)
        size = own.choice([0, 1, 512, 9000, -1])
        assert file.read(size) == oracle.read(size)
        assert file.tell() == oracle.tell()
    file.seek(10)
    assert BlobFile(Memory()).seek(5, io.SEEK_CUR) == 5


def test_a_remote_file_asks_for_much_at_a_time():
    blob = Memory()
    file = open_buffered(blob)
    for offset in range(0, len(DATA), 512):
        file.seek(offset)
        file.read(512)
    assert blob.asked == [(0, len(DATA))]
