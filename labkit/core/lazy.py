"""Values made on first use: once for a process and its forks, or once per process."""

import os
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Made = TypeVar("Made")


class Lazy(Generic[Made]):
    """A value made on first use, once for all threads. Forks keep their parent's value; a pickle makes its own."""

    def __init__(self, make: Callable[[], Made]):
        self._make = make
        self._value: Made
        self._owner: int | None = None
        self._locks: dict[int, threading.Lock] = {}  # by process: another thread may hold one during a fork

    def __call__(self) -> Made:
        if not self._is_made():
            with self._locks.setdefault(os.getpid(), threading.Lock()):
                if not self._is_made():
                    self._value = self._make()
                    self._owner = os.getpid()
        return self._value

    def _is_made(self) -> bool:
        return self._owner is not None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._make,)


class PerProcess(Lazy[Made]):
    """A value that each process makes for itself, forks included, such as a connection or an open file."""

    def _is_made(self) -> bool:
        return self._owner == os.getpid()
