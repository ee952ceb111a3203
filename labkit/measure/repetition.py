"""Loaders that go on with the next pass while a clock needs them, with the workers and queues that already run."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from labkit.measure.runs import count_images


class LoaderWrapper:
    """A loader around another one, `loader`, whose batches it hands on one by one.

    Attributes:
        batches_ahead: Batches that it takes before it hands out the first.
    """

    loader: Any
    batches_ahead = 0


class WithStep(LoaderWrapper):
    """What `with_step` returns."""

    def __init__(self, loader: Iterable[Any], step: Callable[[Any], Any]):
        self.loader, self._step = loader, step
        self.batch_size = getattr(loader, "batch_size", None)
        self.num_workers = getattr(loader, "num_workers", 0)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            self._step(batch)
            yield batch


def with_step(loader: Iterable[Any], step: Callable[[Any], Any]) -> WithStep:
    """A loader and the step that takes its batches, as one iterable: a training loop for `compare`.

    Args:
        loader: Any iterable of batches.
        step: Called with each batch, in this process, before the batch is handed on.

    A generator would do the same, but `compare` cannot see through it: it knows neither how many batches the loader
    holds ready nor how to lengthen its epoch.

    Taught in: notebooks/07_cuda_prefetch.ipynb
    """
    return WithStep(loader, step)


def whole_pass(loader: Iterable[Any], count: Callable[[Any], int] = count_images) -> Iterator[int]:
    """One pass over a loader as a single batch, for `compare`: the start, the first batch and the end are in its rate.

    Args:
        loader: Any iterable of batches.
        count: Returns the images of a batch.

    Taught in: notebooks/12_find_the_stall.ipynb
    """
    yield sum(map(count, loader))


@contextmanager
def repeating(iterable: Any, is_wanted: Callable[[], bool]) -> Iterator[bool]:
    """While open, `iter(iterable)` goes on with another pass as long as `is_wanted()`; gives whether it can.

    The passes are one to the loader: its workers keep running and its queue stays filled. Batches that were requested
    before `is_wanted()` turned false are still delivered.

    Args:
        iterable: torch's DataLoader over a map-style data set, a loader with `repeats_batch_sampler`, or a
            `LoaderWrapper` around one. Others are left alone.
        is_wanted: Asked before each batch after the first.
    """
    loader, name = _innermost(iterable), _sampler_name(iterable)
    if name is None:
        yield False
        return
    sampler = vars(loader)[name]
    repeated = _RepeatedSampler(sampler, is_wanted)
    _put_sampler(loader, name, repeated)
    try:
        yield True
    finally:
        _put_sampler(loader, name, sampler)
        repeated.is_wanted = None  # should anything still hold it, it gives the loader's own pass


def batches_in_flight(iterable: Any) -> int:
    """Batches that a loader requests before it hands out the first; 0 for an iterable that is not known."""
    ahead = 0
    while isinstance(iterable, LoaderWrapper):
        ahead += iterable.batches_ahead
        iterable = iterable.loader
    if _is_dataloader(iterable):
        return ahead + iterable.num_workers * (iterable.prefetch_factor or 0)
    return ahead + int(getattr(iterable, "batches_in_flight", 0))


def batches_per_pass(iterable: Any) -> int | None:
    """Batches of one pass over a loader that can be repeated; None if it does not tell."""
    name = _sampler_name(iterable)
    try:
        return len(vars(_innermost(iterable))[name]) if name else None
    except TypeError:  # a sampler without a length
        return None


def _put_sampler(loader: Any, name: str, sampler: Any) -> None:
    vars(loader)[name] = sampler  # past DataLoader.__setattr__, which refuses it
    running = vars(loader).get("_iterator")  # of persistent workers: torch keeps the sampler there, too
    if running is not None:
        running._index_sampler = sampler


class _RepeatedSampler:
    """A sampler's indices, pass after pass, until no more are wanted."""

    def __init__(self, sampler: Any, is_wanted: Callable[[], bool]):
        self._sampler = sampler
        self.is_wanted: Callable[[], bool] | None = is_wanted  # None: the sampler's one pass

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)  # set_epoch, batch_size, sampler, ...

    def __iter__(self) -> Iterator[Any]:
        n_given = n_before = 0
        while True:
            for indices in self._sampler:
                if n_given and self.is_wanted and not self.is_wanted():
                    return
                n_given += 1
                yield indices
            if n_given == n_before or not (
                self.is_wanted and self.is_wanted()
            ):  # an empty pass would be repeated for ever
                return
            n_before = n_given


def _innermost(iterable: Any) -> Any:
    while isinstance(iterable, LoaderWrapper):
        iterable = iterable.loader
    return iterable


def _sampler_name(iterable: Any) -> str | None:
    """The attribute that holds a loader's sampler of batches; None if it has none that can be repeated."""
    loader = _innermost(iterable)
    if getattr(loader, "repeats_batch_sampler", False):
        return "batch_sampler"
    if not _is_dataloader(loader) or isinstance(loader.dataset, sys.modules["torch"].utils.data.IterableDataset):
        return None
    return "sampler" if loader.batch_sampler is None else "batch_sampler"


def _is_dataloader(iterable: Any) -> bool:
    torch = sys.modules.get("torch")  # whoever has a DataLoader has imported it
    return torch is not None and isinstance(iterable, torch.utils.data.DataLoader)
