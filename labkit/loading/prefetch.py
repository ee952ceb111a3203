"""CUDAPrefetcher: copy the next batches to the device while it computes on this one."""

import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.errors import OperationError
from labkit.measure.steady import LoaderWrapper
from labkit.util.arguments import require_a, require_int, require_iterable
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
    once per epoch. An error of the loader is raised after the batches that came before it. If the loader has
    `state_dict`, so has this: batches that are only copied ahead come after a resume.

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
        self._state: Any = None  # the loader's, when the batch that was handed out last came from it

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        # While unpickling there is no loader yet, so looking it up would recurse forever; and the loader's own
        # `__deepcopy__` would copy only the loader.
        if name == "loader" or name.startswith("__"):
            raise AttributeError(name)
        found = getattr(self.loader, name)  # batch_size, num_workers, set_epoch, dataset, ...
        return {"state_dict": self._state_dict, "load_state_dict": self._load_state_dict}.get(name, found)

    def _place(self) -> Any:
        return self._state

    def _return_to(self, place: Any) -> None:
        self._state = place

    def _state_dict(self) -> Any:
        return self.loader.state_dict() if self._state is None else self._state

    def _load_state_dict(self, state: Any) -> None:
        self.loader.load_state_dict(state)
        self._state = None

    def __iter__(self) -> Iterator[Any]:
        state_of = getattr(self.loader, "state_dict", lambda: None)
        self._state = state_of()
        source: Iterator[Any] | None = iter(self.loader)
        ahead: deque[Any] = deque()
        error: Exception | None = None
        has_given = False
        while source is not None or ahead:
            while source is not None and len(ahead) <= self.depth:
                try:
                    ahead.append((self.transfer.send(next(source)), state_of()))
                except StopIteration:
                    source = None
                except Exception as raised:
                    source, error = None, raised
            # No batch is bound to a name here, so that the consumer holds the last reference.
            if ahead:
                self._state, has_given = ahead[0][1], True
                yield self.transfer.hand_over(*ahead.popleft()[0])
        self._state = None
        if error is not None:
            raise error
        if not has_given and isinstance(self.loader, Iterator):
            raise OperationError(
                f"the loader is a {type(self.loader).__name__}, which can be read once, and is used up: give an object "
                "whose __iter__ starts from the beginning each time, or wrap a new one for each epoch"
            )


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
            warnings.warn(
                "batches are not in pinned memory, so the host waits for every copy: build the loader with "
                "pin_memory=True; torch's DataLoader pins objects that are no dict, list or tuple, data classes among "
                "them, only by a method pin_memory() of their own",
                stacklevel=4,  # the loop that iterates
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
