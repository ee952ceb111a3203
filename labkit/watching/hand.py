"""What a process leaves for others that look at it, whatever holds it up: the sample that it makes, and its stacks."""

import faulthandler
import io
import mmap
import signal
from array import array
from contextlib import suppress
from typing import Any


class LastingFile(io.FileIO):
    """A file without a buffer that is open until nobody has it any more, which is no mistake to warn of."""

    def __del__(self) -> None:
        self.close()


class Hand:
    """The sample that a process has in hand, where another process can read it whatever holds this one up.

    A batch notes its indices at once, and then for each sample when it is begun: the last one that was is in hand.

    Args:
        file: What the notes are shared by; default: they are memory of this process.
    """

    _REST, UNKNOWN = -1.0, -2.0  # in place of an index: none, and one that is no number

    def __init__(self, file: Any = None):
        self._file, self._is_busy = file, False
        self._grow(128)

    def _grow(self, n_numbers: int) -> None:
        """Have a place for so many numbers."""
        place: Any = bytearray(8 * n_numbers)
        if self._file is not None:
            self._file.write(place[self._file.tell() :])  # a hole on a full disk would end the process later
            place = mmap.mmap(self._file.fileno(), len(place))
        self._noted = memoryview(place).cast("d")

    @classmethod
    def shared(cls, path: str) -> "Hand":
        """One in a new file, which `from_file` reads."""
        return cls(LastingFile(path, "wb+"))

    @classmethod
    def from_file(cls, path: str) -> "Hand | None":
        """What another process noted; None if there is no such file."""
        with suppress(OSError), open(path, "rb") as file:
            data, found = file.read(), cls()
            found._noted = memoryview(data[: len(data) // 8 * 8]).cast("d")
            return found
        return None

    def begin(self, indices: list[Any]) -> "memoryview[float]":
        """Note what a batch is made of.

        Returns:
            Numbers in pairs: when a sample is begun, which its maker sets, and its index; then when all are made. If
            another thread makes a batch meanwhile, they are in nobody's hand.
        """
        n_numbers = 2 * len(indices) + 4
        if len(self._noted) < n_numbers and not self._is_busy:
            with suppress(OSError, ValueError):  # a full disk
                self._grow(n_numbers)
        noted = self._noted
        if self._is_busy or len(noted) < n_numbers:
            noted = memoryview(bytearray(8 * n_numbers)).cast("d")
        else:
            self._is_busy = True
        noted[0:n_numbers:2] = array("d", bytes(4 * n_numbers))
        try:
            numbers = array("d", indices)
        except Exception:  # they are no numbers
            numbers = array("d", [self.UNKNOWN]) * len(indices)
        numbers.append(self._REST)
        noted[1 : n_numbers - 2 : 2] = numbers
        return noted

    def rest(self, noted: "memoryview[float]") -> None:
        """The batch is made, or given up."""
        if noted is self._noted:
            noted[0], self._is_busy = 0.0, False

    def _last(self) -> tuple[float, float]:
        last = 0.0, self._REST
        for since_s, index in zip(self._noted[::2], self._noted[1::2], strict=False):
            if not since_s:
                break
            last = since_s, index
        return last

    @property
    def since_s(self) -> float:
        """Since when, by `time.perf_counter()`."""
        return self._last()[0]

    @property
    def index(self) -> float | None:
        """Its index, or `UNKNOWN`; None: no sample is being made."""
        number = self._last()[1]
        return None if number == self._REST else number


hand_here = Hand()  # of this process, whether it trains or is a worker

SIGNAL = int(getattr(signal, "SIGRTMAX", 3)) - 3  # asks a process for its stacks; 0: macOS has none to spare
_answers: Any = None  # the file in which this process answers; closed when it ends


def answer_with_stacks(path: str) -> None:
    """Let this process, and those that it forks, append their stacks to a file when they are asked by `SIGNAL`."""
    global _answers
    if SIGNAL and signal.getsignal(SIGNAL) is signal.SIG_DFL:
        file = LastingFile(path, "ab")
        faulthandler.register(SIGNAL, file, all_threads=True)
        _answers = file


def answers_in() -> str:
    """The path of that file; empty if there is none."""
    return getattr(_answers, "name", "")
