"""Kernels and copies: real bytes that move when the simulated clock says so."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from labkit.pipeline.simulation.engine import Operation, Queue


class Kernel(Operation):
    """Computes from what memory holds when it starts; its results are there when it ends.

    Kernels that change their input in place run when they end.
    """

    def __init__(
        self, queue: Queue, name: str, seconds: float, work: Callable[[], Any], outputs: Iterable[Tensor] = (),
        *, in_place: bool = False,
    ):  # fmt: skip
        super().__init__(queue, name, "compute", seconds)
        self._work, self._outputs, self._in_place = work, list(outputs), in_place
        self._results: list[Tensor] = []

    def start(self) -> None:
        if not self._in_place:
            self._results = self._compute()

    def end(self) -> None:
        results = self._compute() if self._in_place else self._results
        for output, result in zip(self._outputs, results, strict=True):
            output.copy_(result)
        self._work, self._outputs, self._results = list, [], []  # which hold memory

    def _compute(self) -> list[Tensor]:
        with torch.no_grad(), _disable_current_modes():
            return self._work()


class Copy(Operation):
    """Between host and device: half of the bytes at its start, the other half at its end, so that both see it move."""

    def __init__(self, queue: Queue, engine: str, seconds: float, source: Tensor, target: Tensor):
        super().__init__(queue, engine, engine, seconds)
        self._source, self._target = source, target
        self._half = len(source) // 2 if source.dim() else 0

    def start(self) -> None:
        if self._half:
            self._target[: self._half].copy_(self._source[: self._half])

    def end(self) -> None:
        if self._half:
            self._target[self._half :].copy_(self._source[self._half :])
        else:
            self._target.copy_(self._source)
        self._source = self._target = torch.empty(0)
