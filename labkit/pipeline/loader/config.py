"""LoaderConfig: how to load, with defaults that fit the machine."""

import multiprocessing
import os
import warnings
from dataclasses import dataclass, replace

import torch

from labkit.core import core_limits, require_choice, require_int, usable_cores
from labkit.pipeline.samplers import LoaderWarning

_MINIMA = {"batch_size": 1, "num_workers": 0, "prefetch_factor": 1, "seed": -(1 << 63)}


@dataclass(frozen=True)
class LoaderConfig:
    """How to load; what to load is `make_loader`'s other argument. None: what fits the machine.

    Args:
        batch_size: Images in a batch.
        num_workers: Worker processes. None: one per usable core, shared among the ranks that torchrun starts here.
        prefetch_factor: Batches that each worker keeps ready. None: torch's default, 2.
        persistent_workers: Keep the workers between epochs. None: yes.
        pin_memory: Page-locked batches, for copies that overlap. None: where CUDA is available.
        seed: Of the order of samples and of every random draw in them.
        start_method: `"fork"`, `"spawn"` or `"forkserver"`. None: `"forkserver"` in a notebook or console on Linux, as
            a fork may catch one of the kernel's threads holding a lock; elsewhere Python's default. A fork shares the
            data set with the workers; the others send a copy to each.
        oversubscribe: Allow more workers than usable cores.

    Raises:
        ValueError: a value that no loader can have; names the setting.
    """

    batch_size: int = 64
    num_workers: int | None = None
    prefetch_factor: int | None = None
    persistent_workers: bool | None = None
    pin_memory: bool | None = None
    seed: int = 0
    start_method: str | None = None
    oversubscribe: bool = False

    def __post_init__(self) -> None:
        for name, minimum in _MINIMA.items():
            if getattr(self, name) is not None or name in ("batch_size", "seed"):
                object.__setattr__(self, name, require_int(name, getattr(self, name), minimum))
        if self.start_method is not None:
            require_choice("start_method", self.start_method, multiprocessing.get_all_start_methods())

    def resolved(self) -> "LoaderConfig":
        """This configuration as it will be used on this machine, every None filled in. Warns of changes."""
        num_workers = self._limit_workers()
        if not num_workers:
            self._warn_of_idle_settings()
        return replace(
            self,
            num_workers=num_workers,
            prefetch_factor=(self.prefetch_factor or 2) if num_workers else None,
            persistent_workers=num_workers > 0 and self.persistent_workers is not False,
            pin_memory=self._can_pin(),
            start_method=self.start_method if num_workers else None,
        )

    def _limit_workers(self) -> int:
        if self.num_workers is None:
            return cores_per_rank()
        usable = usable_cores()
        if self.num_workers <= usable or self.oversubscribe:
            return self.num_workers
        limits = ", ".join(f"{name} {value}" for name, value in core_limits().items())
        _warn(
            f"num_workers={self.num_workers} reduced to {usable}: this process may use {usable} cores ({limits}), and "
            "more workers would only take turns. LoaderConfig(oversubscribe=True) keeps them"
        )
        return usable

    def _can_pin(self) -> bool:
        has_cuda = torch.cuda.is_available()
        if self.pin_memory and not has_cuda:
            _warn("pin_memory=True is left out: this machine has no CUDA device to copy to")
        return has_cuda and self.pin_memory is not False

    def _warn_of_idle_settings(self) -> None:
        of_workers = ("persistent_workers", "prefetch_factor", "start_method")
        idle = [f"{name}={value!r}" for name in of_workers if (value := getattr(self, name))]
        if idle:
            _warn(f"{', '.join(idle)} left out: with num_workers=0 there is no worker to apply it to")


def cores_per_rank() -> int:
    """Usable cores for this process, at least one: the ranks that torchrun starts on this machine share them."""
    return max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _warn(message: str) -> None:
    warnings.warn(message, LoaderWarning, stacklevel=5)
