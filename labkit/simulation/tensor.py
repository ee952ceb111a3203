"""Tensors of a simulated device: their bytes are in the host's memory, and change in simulated time.

Each call of an operator with such tensors becomes a kernel on the current stream.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.flop_counter import flop_registry

from labkit.errors import OperationError, WrongTypeError
from labkit.simulation.memory import Memory
from labkit.simulation.simulated_device import Simulation, View, active

DEVICE = torch.device("cuda", 0)
_depth = 0


def is_inside_device_function() -> bool:
    """Whether torch is within a function of device tensors: what it allocates there is on the device, too."""
    return _depth > 0


@contextmanager
def device_function() -> Iterator[None]:
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


@contextmanager
def host_function() -> Iterator[None]:
    """Within, what torch allocates is the host's again."""
    global _depth
    depth, _depth = _depth, 0
    try:
        yield
    finally:
        _depth = depth


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
        with device_function(), torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return active().call(func, args, kwargs or {})

    def new_tensor(self, data: Any, dtype: Any = None, device: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or DEVICE, **kwargs)

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        return self.elem.data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise WrongTypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it to the host"
            )
        return self.detach().cpu().numpy()

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy()

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def __deepcopy__(self, memo: dict) -> Tensor:
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        copied = nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied
        memo[id(self)] = copied
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
        tensors, device = _tensors(args, kwargs), kwargs.get("device")
        is_made_there = device is not None and torch.device(device).type == "cuda"
        is_made_inside = device is not None and not tensors and is_inside_device_function()
        if is_made_there or is_made_inside or _on_cuda(tensors):
            return call(func, args, kwargs)
        return func(*args, **kwargs)


def _tensors(*trees: Any) -> list[Tensor]:
    return [item for item in tree_flatten(trees)[0] if isinstance(item, Tensor)]


def call(func: Any, args: Any, kwargs: dict) -> Any:
    """Do, on the active simulation, what an operator says."""
    simulation = active()
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if func is aten.copy_.default:
        return _copy(simulation, *args, **kwargs)
    if func is aten._to_copy.default and not isinstance(args[0], SimulatedTensor):
        return _move(simulation, args[0], **kwargs)
    if func is aten._local_scalar_dense.default:
        return _read(simulation, args[0])
    if torch.Tag.inplace_view in func.tags:
        return _change_view(func, args, kwargs)
    if func.is_view or func is aten._unsafe_view.default:
        return _view(func, args, kwargs)
    args, kwargs = _on_device(simulation, func, args, kwargs)
    if _depends_on_values(func, args, kwargs):
        return _wait_for_shape(simulation, func, args, kwargs)
    return _launch(simulation, func, args, kwargs)


def _depends_on_values(func: Any, args: Any, kwargs: dict) -> bool:
    """Whether the host must know values before it can go on, as for the size of `x[mask]`."""
    if func is aten.index.Tensor:
        return any(item.dtype in (torch.bool, torch.uint8) for item in _tensors(args[1], kwargs))
    return bool({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(func.tags))


def _on_device(simulation: Simulation, func: Any, args: Any, kwargs: dict) -> Any:
    """Single values of the host pass, as CUDA's kernels take them; indices are copied; anything else is an error."""
    name = func.overloadpacket.__name__
    if name.endswith("_like"):  # which asks for a shape, and no values
        return args, kwargs
    host_tensors = [item for item in _tensors(args, kwargs) if not isinstance(item, SimulatedTensor) and item.dim()]
    if host_tensors and name not in _TAKES_HOST_INDICES:
        raise OperationError(
            f"Expected all tensors to be on the same device, but {func.overloadpacket} got at least two devices, "
            "cuda:0 and cpu!"
        )

    def moved(item: Any) -> Any:
        is_host = isinstance(item, Tensor) and not isinstance(item, SimulatedTensor)
        return item if not is_host else _move(simulation, item) if item.dim() else item.clone()

    return tree_map(moved, args), tree_map(moved, kwargs)


def _view(func: Any, args: Any, kwargs: dict) -> Any:
    """Takes no time, and reads nothing."""
    memory = next(item for item in tree_flatten(args)[0] if isinstance(item, SimulatedTensor)).memory
    found = func(*_elems(args), **_elems(kwargs))
    return tree_map(lambda item: SimulatedTensor(item, memory) if isinstance(item, Tensor) else item, found)


def _change_view(func: Any, args: Any, kwargs: dict) -> Any:
    """As `unsqueeze_`: the tensor looks at its block in another way. Kernels that are queued keep the former one."""
    tensor = args[0]
    elem = aten.alias.default(tensor.elem)
    func(elem, *args[1:], **kwargs)
    with no_dispatch():
        func(*args, **kwargs)
    tensor.elem = elem
    return tensor


def _copy(simulation: Simulation, target: Tensor, source: Any, non_blocking: bool = False) -> Tensor:
    if isinstance(target, SimulatedTensor) and isinstance(source, SimulatedTensor):
        return _launch(simulation, aten.copy_.default, (target, source), {})
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


def _read(simulation: Simulation, source: SimulatedTensor) -> Any:
    """`item()`: the host waits for the stream, then for the value."""
    target = torch.empty(tuple(source.shape), dtype=source.dtype)
    simulation.copy_to_host(source.view_of_block, target, non_blocking=False, reason="item()")
    return target.item()


def _wait_for_shape(simulation: Simulation, func: Any, args: Any, kwargs: dict) -> Any:
    """The host must know the values before it can allocate the result."""
    simulation.wait(simulation.current.newest, f"{func.overloadpacket}, whose result depends on values")
    return _launch(simulation, func, args, kwargs, like=func(*_elems(args), **_elems(kwargs)))


def _launch(simulation: Simulation, func: Any, args: Any, kwargs: dict, like: Any = None) -> Any:
    """Queue the kernel; its results get their memory now and their values when it has run."""
    written = _written(func, args, kwargs)
    if like is None:
        like = _shapes(func, args, kwargs)
    results, fresh = _results(simulation, func, args, kwargs, like)
    work = _make_work(simulation, func, _elems(args), _elems(kwargs), [is_new for _, is_new in fresh])
    outputs = [item for item, is_new in fresh if is_new]
    name = func.overloadpacket.__name__
    if (written or outputs) and name not in _ALLOCATIONS:
        simulation.launch(
            name, work, reads=_views(_on_cuda(args, kwargs)), writes=_views([*written, *outputs]),
            outputs=[elem for elem, _ in _views(outputs)], n_flops=_count_flops(func, args, kwargs, results),
            in_place=bool(written),
        )  # fmt: skip
    return results


def _views(tensors: list[SimulatedTensor]) -> list[View]:
    return [item.view_of_block for item in tensors]


def _on_cuda(*trees: Any) -> list[SimulatedTensor]:
    return [item for item in _tensors(*trees) if isinstance(item, SimulatedTensor)]


def _count_flops(func: Any, args: Any, kwargs: dict, results: Any) -> float:
    """As torch's FlopCounterMode counts; 0 for what it does not count, such as elementwise work."""
    count = flop_registry.get(func.overloadpacket)
    return count(*args, **kwargs, out_val=results) if count else 0.0


def _make_work(simulation: Simulation, func: Any, args: Any, kwargs: dict, are_new: list[bool]) -> Any:
    """What the kernel does, without its results: it must not keep their memory in use while it is queued."""
    seed = simulation.draw_seed() if torch.Tag.nondeterministic_seeded in func.tags else None

    def work() -> list[Tensor]:
        with simulation.random_numbers(seed):
            found = func(*args, **kwargs)
        return [item for item, is_new in zip(_tensors(found), are_new, strict=True) if is_new]

    return work


def _results(simulation: Simulation, func: Any, args: Any, kwargs: dict, like: Any) -> tuple[Any, list]:
    """What the call returns: arguments that it writes to, and new tensors. And each tensor with whether it is new."""
    fresh: list[tuple[Any, bool]] = []
    returned = like if isinstance(like, (tuple, list)) else (like,)
    declared = func._schema.returns
    named = _named(func, args, kwargs)

    def one(item: Any, alias: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        owner = _owner(func, named, alias) if alias is not None and alias.is_write else None
        made = (
            owner if owner is not None else SimulatedTensor(*simulation.allocate(item.shape, item.stride(), item.dtype))
        )
        fresh.append((made, owner is None))
        return made

    if len(declared) == 1 and isinstance(like, (tuple, list)):
        return [one(item, None) for item in like], fresh
    results = [one(item, returns.alias_info) for item, returns in zip(returned, declared, strict=False)]
    return (type(like)(results) if isinstance(like, (tuple, list)) else results[0] if results else None), fresh


def _named(func: Any, args: Any, kwargs: dict) -> dict[str, Any]:
    return {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs


def _owner(func: Any, named: dict, alias: Any) -> Any:
    """The argument that a result is."""
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.before_set == alias.before_set:
            return named.get(argument.name)
    return None


def _written(func: Any, args: Any, kwargs: dict) -> list[SimulatedTensor]:
    named = _named(func, args, kwargs)
    are_written = [one for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    return _on_cuda([named.get(argument.name) for argument in are_written])


def _shapes(func: Any, args: Any, kwargs: dict) -> Any:
    """The call on tensors without values; where torch cannot do that, on copies of whatever is in memory."""

    def like(item: Any) -> Any:
        if isinstance(item, SimulatedTensor):
            return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device="meta")
        return torch.device("meta") if isinstance(item, torch.device) else item

    try:
        return func(*tree_map(like, args), **tree_map(like, kwargs))
    except NotImplementedError:
        copies = tree_map(lambda item: item.elem.clone() if isinstance(item, SimulatedTensor) else item, (args, kwargs))
        return func(*copies[0], **copies[1])


def _elems(tree: Any) -> Any:
    return tree_map(lambda item: item.elem if isinstance(item, SimulatedTensor) else item, tree)
