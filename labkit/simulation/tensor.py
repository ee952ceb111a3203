"""Tensors of a simulated device: their bytes are in the host's memory, and change in simulated time.

Each call of an operator with such tensors becomes a kernel on the current stream.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from labkit.errors import OperationError, WrongTypeError
from labkit.simulation.memory import Memory
from labkit.simulation.simulated_device import Simulation, View, active
from labkit.simulation.torch_names import (
    TorchDispatchMode,
    disable_torch_function,
    flop_registry,
    no_dispatch,
    tree_leaves,
    tree_map,
)

DEVICE = torch.device("cuda", 0)
_is_inside = False


@contextmanager
def allocating_on_device(is_inside: bool = True) -> Iterator[None]:
    """Within, torch is in a function of device tensors: what it allocates there is on the device, too; or not."""
    global _is_inside
    before, _is_inside = _is_inside, is_inside
    try:
        yield
    finally:
        _is_inside = before


class SimulatedTensor(Tensor):
    """Says that it is on `cuda:0`. To torch's C++ it is a tensor of the CPU without storage.

    So autograd runs in the thread that calls it, and no CUDA library is asked for anything. `elem` is the view of the
    block that holds the values, once the simulated clock has come that far; `memory` keeps the block in use.
    """

    elem: Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, elem: Tensor, memory: Memory) -> "SimulatedTensor":
        self = Tensor._make_wrapper_subclass(
            cls, elem.size(), strides=elem.stride(), storage_offset=elem.storage_offset(), dtype=elem.dtype
        )
        self.elem, self.memory = elem, memory
        return self

    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    @property
    def view_of_block(self) -> View:
        return self.elem, self.memory

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with allocating_on_device(), disable_torch_function():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return call(func, args, kwargs or {})

    def new_tensor(self, data: Any, dtype: Any = None, device: Any = None, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or DEVICE, **kwargs)

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise WrongTypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it to the host"
            )
        return self.detach().cpu().numpy()

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def __deepcopy__(self, memo: dict) -> Tensor:
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        memo[id(self)] = copied = nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied
        return copied

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{self.detach().cpu()!r}"[:-1] + ", device='cuda:0')"


aten = torch.ops.aten
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_TAKES_HOST_INDICES = {"index", "index_put", "index_put_", "_index_put_impl_"}


class DeviceMode(TorchDispatchMode):
    """Sees every operator. Those of the host run as ever."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("pin_memory"):
            return active().pinned.copy_of(func(*args, **{**kwargs, "pin_memory": False}))
        device = kwargs.get("device")
        is_made_there = device is not None and (
            torch.device(device).type == "cuda" or (_is_inside and not _tensors(args, kwargs))
        )
        return call(func, args, kwargs) if is_made_there or _on_cuda(args, kwargs) else func(*args, **kwargs)


def _tensors(*trees: Any) -> list[Tensor]:
    return [item for item in tree_leaves(trees) if isinstance(item, Tensor)]


def _on_cuda(*trees: Any) -> list[SimulatedTensor]:
    return [item for item in _tensors(*trees) if isinstance(item, SimulatedTensor)]


def _elems(tree: Any) -> Any:
    return tree_map(lambda item: item.elem if isinstance(item, SimulatedTensor) else item, tree)


def call(func: Any, args: Any, kwargs: dict) -> Any:
    """Do, on the active simulation, what an operator says."""
    simulation = active()
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if func is aten.copy_.default and not all(isinstance(item, SimulatedTensor) for item in args[:2]):
        return _copy(simulation, *args, **kwargs)
    if func is aten._to_copy.default and not isinstance(args[0], SimulatedTensor):
        return _move(simulation, args[0], **kwargs)
    if func is aten._local_scalar_dense.default:  # item(): the host waits for the stream, then for the value
        target = torch.empty(tuple(args[0].shape), dtype=args[0].dtype)
        simulation.copy_to_host(args[0].view_of_block, target)
        return target.item()
    if torch.Tag.inplace_view in func.tags:  # as unsqueeze_: kernels that are queued keep the former view
        elem = aten.alias.default(args[0].elem)
        func(elem, *args[1:], **kwargs)
        with no_dispatch():
            func(*args, **kwargs)
        args[0].elem = elem
        return args[0]
    if func.is_view or func is aten._unsafe_view.default:  # takes no time, and reads nothing
        memory = _on_cuda(args)[0].memory
        found = func(*_elems(args), **_elems(kwargs))
        return tree_map(lambda item: SimulatedTensor(item, memory) if isinstance(item, Tensor) else item, found)
    return _launch(simulation, func, *_without_host_tensors(simulation, func, args, kwargs))


def _copy(simulation: Simulation, target: Tensor, source: Any, non_blocking: bool = False) -> Tensor:
    """`copy_` between host and device."""
    if isinstance(target, SimulatedTensor):
        converted = source.to(target.dtype)  # by the host, as torch does; the result is not in page-locked memory
        simulation.copy_to_device(converted.expand(target.shape), target.view_of_block, non_blocking=non_blocking)
    else:
        same = target if source.dtype == target.dtype else torch.empty_like(target, dtype=source.dtype)
        simulation.copy_to_host(source.expand(target.shape).view_of_block, same, non_blocking=non_blocking)
        if same is not target:
            target.copy_(same)  # pageable memory: the host has waited
    return target


def _move(
    simulation: Simulation, source: Tensor, *, dtype: Any = None, non_blocking: bool = False, memory_format: Any = None,
    **_: Any,
) -> SimulatedTensor:  # fmt: skip
    """A tensor of the host, converted there and copied to new memory of the device."""
    source = source if dtype is None else source.to(dtype)
    like = torch.empty_like(source, device="meta", memory_format=memory_format or torch.preserve_format)
    moved = SimulatedTensor(*simulation.allocate(like.shape, like.stride(), source.dtype))
    simulation.copy_to_device(source, moved.view_of_block, non_blocking=non_blocking)
    return moved


def _without_host_tensors(simulation: Simulation, func: Any, args: Any, kwargs: dict) -> Any:
    """Single values of the host pass, as CUDA's kernels take them; indices are copied; anything else is an error."""
    name = func.overloadpacket.__name__
    if name.endswith("_like"):  # which asks for a shape, and no values
        return args, kwargs

    def moved(item: Any) -> Any:
        if not isinstance(item, Tensor) or isinstance(item, SimulatedTensor):
            return item
        if item.dim() and name not in _TAKES_HOST_INDICES:
            raise OperationError(
                f"Expected all tensors to be on the same device, but {func.overloadpacket} got at least two devices, "
                "cuda:0 and cpu!"
            )
        return _move(simulation, item) if item.dim() else item.clone()

    return tree_map(moved, args), tree_map(moved, kwargs)


def _launch(simulation: Simulation, func: Any, args: Any, kwargs: dict) -> Any:
    """Queue the kernel; its results get their memory now and their values when it has run."""
    owners: dict[int, Any] = {}  # id of what stands for an argument -> the argument, which the call may return
    like = _like(simulation, func, args, kwargs, owners)
    are_new: list[bool] = []

    def made(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        are_new.append(id(item) not in owners)
        if not are_new[-1]:
            return owners[id(item)][1]
        return SimulatedTensor(*simulation.allocate(item.shape, item.stride(), item.dtype))

    results = tree_map(made, like)
    outputs = [item for item, is_new in zip(_on_cuda(results), are_new, strict=True) if is_new]
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    written = [named.get(one.name) for one in func._schema.arguments if one.alias_info and one.alias_info.is_write]
    writes = [item.view_of_block for item in [*_on_cuda(written), *outputs]]
    name = func.overloadpacket.__name__
    if writes and name not in _ALLOCATIONS:
        count_flops = flop_registry.get(func.overloadpacket)  # elementwise work counts none
        simulation.launch(
            name, _work(simulation, func, _elems(args), _elems(kwargs), are_new),
            reads=[item.view_of_block for item in _on_cuda(args, kwargs)], writes=writes,
            outputs=[item.elem for item in outputs], in_place=bool(_on_cuda(written)),
            n_flops=count_flops(*args, **kwargs, out_val=results) if count_flops else 0.0,
        )  # fmt: skip
    return results


def _work(simulation: Simulation, func: Any, args: Any, kwargs: dict, are_new: list[bool]) -> Any:
    """What the kernel does, without its results: it must not keep their memory in use while it is queued."""
    # Drawn now: the kernel draws the same numbers whenever it runs, and those of the host are untouched.
    seed = simulation.random.getrandbits(62) if torch.Tag.nondeterministic_seeded in func.tags else None

    def work() -> list[Tensor]:
        with torch.random.fork_rng(devices=[], enabled=seed is not None):
            if seed is not None:
                torch.default_generator.manual_seed(seed)
            found = func(*args, **kwargs)
        return [item for item, is_new in zip(_tensors(found), are_new, strict=True) if is_new]

    return work


def _like(simulation: Simulation, func: Any, args: Any, kwargs: dict, owners: dict[int, Any]) -> Any:
    """The results' shapes: the call on tensors without values, or on copies where values matter or torch cannot."""
    depends_on_values = bool({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(func.tags))
    if func is aten.index.Tensor:
        depends_on_values = any(item.dtype in (torch.bool, torch.uint8) for item in _tensors(args[1]))
    if depends_on_values:  # as x[mask]: the host must know them before it can go on
        simulation.wait(simulation.current.newest)

    def call_on(are_copies: bool) -> Any:
        def stand_in(item: Any) -> Any:
            if isinstance(item, torch.device) and not are_copies:
                return torch.device("meta")
            if not isinstance(item, SimulatedTensor):
                return item
            like = torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device="meta")
            made = item.elem.clone() if are_copies else like
            owners[id(made)] = made, item  # kept, so that no other gets its id
            return made

        given = tree_map(stand_in, (args, kwargs))
        with torch.random.fork_rng(devices=[], enabled=are_copies):  # those of the host are untouched
            return func(*given[0], **given[1])

    try:
        return call_on(are_copies=depends_on_values)
    except NotImplementedError:
        return call_on(are_copies=True)
