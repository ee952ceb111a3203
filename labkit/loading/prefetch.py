"""CUDAPrefetcher: copy the next batches to the device while it computes on this one."""

import gc
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.errors import OperationError
from labkit.loading.resume import FailedBatch
from labkit.measure.steady import LoaderWrapper
from labkit.util.arguments import require_a, require_int, require_iterable
from labkit.util.process import warn_caller
from labkit.util.tensor_trees import iter_tensors, move_tensors

Copied = tuple[torch.Event, list[Tensor]]  # what a batch has to wait for, and what was made on the device for it


class CUDAPrefetcher(LoaderWrapper):
    """Wrap a loader so that its batches arrive on the device, copied ahead on a separate stream.

    Args:
        loader: Any iterable of batches: tensors in any nest of dicts, lists, tuples and data classes, and objects with
            a method `to` of their own, such as tokenizers' encodings, graphs and packed sequences, which is called.
            Types and attributes are kept. Copies overlap with compute only if the tensors are in pinned memory
            (`pin_memory=True`).
        device: Where batches go: CUDA, or any accelerator whose streams torch offers (`torch.Stream`). On a CPU there
            is nothing to copy: batches pass through, so the same script runs. On a device without streams, such as
            MPS, they are copied as they come.
        depth: Number of batches copied ahead of the one that is handed out. One hides the copy. More smooth out copies
            of unequal size and cost the GPU memory of one batch each. They do not help a loader that stalls, since
            `next()` waits for the batch `depth` places ahead: give it workers and a larger `prefetch_factor`.

    The side stream lives as long as this object, and batches are allocated in its memory. The consumer's stream
    therefore waits for the copy (an event), and the allocator is told that the consumer's stream uses the tensors
    (`record_stream`): all that torch made while the batch was copied, wherever an object hides them. torch refuses that
    for sparse tensors and for nested ones without `layout=torch.jagged`: make them on the device. Without it, the
    next copy could overwrite a batch that queued kernels have yet to read, once its last reference is dropped. Iterate
    once per epoch. An error of the loader is raised after the batches that came before it; whoever catches it gets what
    the loader gives after it. If the loader has `state_dict`, so has this, and so has each pass over it: batches that
    are only copied ahead come after a resume. A look at some batches while another pass is running changes nothing, as
    it is with the loaders of `lk.make_loader` and `lk.BatchLoader`.

    >>> loader = lk.make_loader(lk.ImageDataset("photos"), lk.LoaderConfig(batch_size=1))
    >>> for images, labels in lk.CUDAPrefetcher(loader, "cuda"):  # doctest: +SKIP
    ...     train(images, labels)

    Raises:
        RuntimeError: a device was asked for and there is none of its kind; or a generator is iterated a second time.
        ValueError: `depth` is below 1.

    Source: PyTorch's notes on CUDA semantics and the caching allocator. Taught in: notebooks/07_cuda_prefetch.ipynb
    """

    def __init__(self, loader: Iterable[Any], device: Any = "cuda", *, depth: int = 1):
        self.loader: Any = require_iterable("loader", loader, "a loader, or another iterable of batches")
        require_a((str, int, torch.device), "device", device, "such as 'cuda', 'cuda:1' or torch.device('cpu')")
        self.depth, self.device = require_int("depth", depth), torch.device(device)
        self.batches_ahead = depth
        self.transfer = _make_transfer(self.device)
        self._newest: _Standing | None = None  # of the pass that handed out a batch last; None: as the loader stands
        self._n_loads = 0

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        # While unpickling there is no loader yet, so looking it up would recurse forever; and the loader's own
        # `__deepcopy__` would copy only the loader.
        if name == "loader" or name.startswith("__"):
            raise AttributeError(name)
        found = getattr(self.loader, name)  # batch_size, num_workers, dataset, ...
        own = {
            "state_dict": self._state_dict, "load_state_dict": self._load_state_dict, "set_epoch": self._set_epoch,
        }  # fmt: skip
        return own.get(name, found)

    @property
    def epoch(self) -> Any:
        """Number of the next epoch, of a loader that has one."""
        self._collect_looks()
        return self.loader.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.loader.epoch = epoch
        self._stand_as_set()

    def _set_epoch(self, epoch: int) -> None:
        self.loader.set_epoch(epoch)
        self._stand_as_set()

    def _stand_as_set(self) -> None:
        if self._newest is not None:
            self._newest.place_at_end = None  # what the loader is set to holds
        self._newest = None

    def _state_dict(self) -> Any:
        self._collect_looks()
        return self.loader.state_dict() if self._newest is None else self._newest.state

    def _collect_looks(self) -> None:
        """End a look that nobody holds any more but the traceback of an error that it would raise next."""
        if self._newest is not None and self._newest.holds_error:
            gc.collect()

    def _load_state_dict(self, state: Any) -> None:
        self.loader.load_state_dict(state)
        self._newest, self._n_loads = None, self._n_loads + 1

    def _place(self) -> tuple[Any, ...]:
        """Where this object and its loader stand, for `_return_to`."""
        return _place_of(self.loader), self._newest, self._n_loads

    def _return_to(self, place: tuple[Any, ...]) -> None:
        """Stand again where `_place` was called, as if nothing had been loaded since."""
        of_loader, self._newest, self._n_loads = place
        if of_loader is not None:
            self.loader._return_to(of_loader)

    def _stand_at(self, standing: "_Standing") -> None:
        """Stand at a pass, wherever a look has left this object and the loader."""
        if standing.n_loads != self._n_loads:
            return  # a state was loaded since that pass began, and it is the next one's
        if standing.place_at_end is not None and self._newest is not standing:
            self.loader._return_to(standing.place_at_end)
        self._newest = standing

    def __iter__(self) -> Iterator[Any]:
        return _PrefetchedPass(self)


class _Standing:
    """Where a pass over a prefetcher stands.

    Attributes:
        state: The loader's, when the batch came from it that was handed out last.
        outer: The pass at which the prefetcher stood before.
        place_before, place_at_end: Of the loader, when the pass began, and when the loader's own pass had ended, which
            is some batches before this one ends; None if the loader has none.
    """

    def __init__(self, prefetcher: CUDAPrefetcher):
        self.state = getattr(prefetcher, "state_dict", lambda: None)()
        self.outer, self.n_loads = prefetcher._newest, prefetcher._n_loads
        self.place_before = _place_of(prefetcher.loader)
        self.place_at_end: Any = None
        self.has_given, self.is_running = False, True
        self.holds_error = False  # of a batch that is still to come


def _place_of(loader: Any) -> Any:
    return getattr(loader, "_place", lambda: None)()


class _PrefetchedPass(Iterator[Any]):
    """One pass over a prefetcher, some batches ahead of the one that is handed out. It begins with the first `next`."""

    def __init__(self, prefetcher: CUDAPrefetcher):
        self._prefetcher = prefetcher
        self._standing: _Standing | None = None
        self._batches: Iterator[Any] | None = None
        self._ahead = deque[tuple[Any, Any]]()  # what was sent, or an error, and the loader's state behind it

    def __len__(self) -> int:
        return len(self._prefetcher)

    def state_dict(self) -> Any:
        """Where this pass stands: what the prefetcher's `state_dict` says while it stands here."""
        return self._prefetcher.state_dict() if self._standing is None else self._standing.state

    def __next__(self) -> Any:
        standing, prefetcher = self._standing or self._begin(), self._prefetcher
        if not standing.is_running:
            raise StopIteration
        try:
            self._copy_ahead(standing)
        except BaseException:  # such as Ctrl-C
            self.close()
            raise
        prefetcher._stand_at(standing)
        if not self._ahead:
            self._finish(standing)
        standing.state, standing.has_given = self._ahead[0][1], True
        if isinstance(self._ahead[0][0], FailedBatch):
            standing.holds_error = False
            raise self._ahead.popleft()[0].take_error()
        # No batch is bound to a name here, so that the consumer holds the last reference.
        return prefetcher.transfer.hand_over(*self._ahead.popleft()[0])

    def _begin(self) -> _Standing:
        self._prefetcher._collect_looks()
        self._prefetcher._newest = self._standing = standing = _Standing(self._prefetcher)
        try:
            self._batches = iter(self._prefetcher.loader)
        except BaseException:
            self.close()
            raise
        return standing

    def _copy_ahead(self, standing: _Standing) -> None:
        loader, transfer = self._prefetcher.loader, self._prefetcher.transfer
        state_of = getattr(loader, "state_dict", lambda: None)
        while self._batches is not None and len(self._ahead) <= self._prefetcher.depth:
            if self._ahead and isinstance(self._ahead[-1][0], FailedBatch):
                return  # what is behind an error is asked for by whoever has caught it
            try:
                # The loader stands at the pass that gave a batch last, so that its state is this pass's.
                self._ahead.append((transfer.send(next(self._batches)), state_of()))
            except StopIteration:
                self._batches, standing.place_at_end = None, _place_of(loader)
            except Exception as error:
                self._ahead.append((FailedBatch(error), state_of()))
                standing.holds_error = True

    def _finish(self, standing: _Standing) -> NoReturn:
        prefetcher, standing.is_running, standing.outer = self._prefetcher, False, None
        if prefetcher._newest is standing:
            prefetcher._newest = None  # the loader itself stands at the beginning of the next epoch
        if not standing.has_given and isinstance(prefetcher.loader, Iterator):
            raise OperationError(
                f"the loader is a {type(prefetcher.loader).__name__}, which can be read once, and is used up: give an "
                "object whose __iter__ starts from the beginning each time, or wrap a new one for each epoch"
            )
        raise StopIteration

    def close(self) -> None:
        """Leave the pass. One that was a look into another, or handed out nothing, leaves no trace."""
        standing, batches = self._standing, self._batches
        if standing is None or not standing.is_running:
            return
        standing.is_running, self._batches = False, None
        outer, standing.outer = standing.outer, None
        self._ahead.clear()
        getattr(batches, "close", lambda: None)()
        del batches
        if self._prefetcher._newest is not standing:
            return
        if outer is not None and outer.is_running:
            self._prefetcher._stand_at(outer)
        elif not standing.has_given:
            self._prefetcher._newest = None
            if standing.place_before is not None:
                self._prefetcher.loader._return_to(standing.place_before)

    __del__ = close

    def _shutdown_workers(self) -> None:
        """Leave the pass and end the workers of the loader's own."""
        getattr(self._batches, "_shutdown_workers", lambda: None)()
        self.close()


def _make_transfer(device: torch.device) -> "PassThrough | CopyStream":
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if device.type == "cpu":
        return PassThrough(device)
    if accelerator is None or accelerator.type != device.type:
        name = "CUDA" if device.type == "cuda" else device.type
        raise OperationError(f"device={str(device)!r}, but {name} is not available: pass device='cpu'")
    return PassThrough(device) if device.type == "mps" else CopyStream(device)


class PassThrough:
    """Moves batches as they come, for devices without streams."""

    def __init__(self, device: torch.device):
        self.device = device

    def send(self, batch: Any) -> tuple[Any, None]:
        return move_tensors(batch, self.device), None

    def hand_over(self, sent: Any, copied: None) -> Any:
        return sent


class CopyStream:
    """Copies on a side stream, handed over to the stream that the consumer uses."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.Stream(device)
        self._has_looked = False

    def send(self, batch: Any) -> tuple[Any, Copied]:
        """Start copying a batch without making the host wait."""
        self._warn_if_unpinned(batch)
        with self.stream, _NotesTensors(self.device.type) as noted:
            sent = move_tensors(batch, self.device, non_blocking=True)
        return sent, (self.stream.record_event(), noted.tensors)

    def hand_over(self, sent: Any, copied: Copied) -> Any:
        consumer, (event, made) = torch.accelerator.current_stream(self.device), copied
        consumer.wait_event(event)
        for tensor in (*made, *iter_tensors(sent)):  # a loader may have made some on the device itself
            if tensor.device.type == self.device.type:
                tensor.record_stream(consumer)
        return sent

    def _warn_if_unpinned(self, batch: Any) -> None:
        if self._has_looked:
            return
        self._has_looked = True
        on_host = [tensor for tensor in iter_tensors(batch) if tensor.device.type == "cpu" and tensor.numel()]
        if on_host and not any(tensor.is_pinned() for tensor in on_host):
            warn_caller(
                "batches are not in pinned memory, so the host waits for every copy: build the loader with "
                "pin_memory=True; torch's DataLoader pins objects that are no dict, list or tuple, data classes among "
                "them, only by a method pin_memory() of their own",
                UserWarning,
            )


class _NotesTensors(TorchDispatchMode):
    """Notes every tensor that torch makes on a device, also for code that hides it in an object or drops it again."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        made = result if isinstance(result, tuple | list) else (result,)
        self.tensors += [item for item in made if isinstance(item, Tensor) and item.device.type == self.kind]
        return result
