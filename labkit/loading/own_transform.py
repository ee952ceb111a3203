"""A transform of one's own, called with each crop by many threads, with draws that depend on the image alone."""

import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from labkit.errors import ArgumentError, WrongTypeError
from labkit.loading.drawing import find_drawing
from labkit.loading.seeding import AGAIN, derived_seed, find_generators, seed_generator
from labkit.util.arguments import kind_of, require_callable, require_seed

# Whatever code a pickled transform needs is named in it. If these alone are named, no code draws from the global NumPy
# and Python generators, and torch's is drawn from only by the functions in `_DRAWS`.
_KNOWN_PACKAGES = ("albumentations.", "torchvision.transforms.v2.")
_KNOWN_NAMES = {
    *(f"builtins.{name}" for name in ("bytearray", "complex", "dict", "frozenset", "list", "object", "range")),
    *(f"builtins.{name}" for name in ("set", "slice", "tuple")),
    "cloudpickle.cloudpickle._builtin_type", "collections.OrderedDict", "collections.defaultdict", "numpy.dtype",
    "numpy.ndarray", "numpy._core.multiarray._reconstruct", "numpy._core.multiarray.scalar",
    "numpy._core.numeric._frombuffer", "numpy.random._pcg64.PCG64", "numpy.random._pickle.__bit_generator_ctor",
    "numpy.random._pickle.__generator_ctor", "numpy.random.bit_generator.SeedSequence",
    "numpy.random.bit_generator.__pyx_unpickle_SeedSequence", "random.Random", "torch.Size",
    "torch._utils._rebuild_tensor_v2", "torch.nn.modules.container.ModuleList",
    "torch.nn.modules.container.Sequential", "torch.storage._load_from_bytes",
    "torchvision.transforms.autoaugment.AutoAugmentPolicy", "torchvision.transforms.functional.InterpolationMode",
}  # fmt: skip
_OF_PILLOW = ("timm.", "torchvision.transforms.transforms", "torchvision.transforms.autoaugment")

_DRAWS_LIKE: dict[Any, Callable[..., Tensor]] = {  # these take a generator only in newer versions of torch
    torch.rand_like: Tensor.uniform_,
    torch.randn_like: Tensor.normal_,
}
_DRAWS = {
    *(getattr(torch, name) for name in ("bernoulli", "multinomial", "normal", "poisson", "rand", "randint", "randn")),
    *(getattr(Tensor, name) for name in ("bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_")),
    *(getattr(Tensor, name) for name in ("log_normal_", "multinomial", "normal_", "random_", "uniform_")),
    torch.randperm, torch._sample_dirichlet, *_DRAWS_LIKE,
}  # fmt: skip


class OwnTransform:
    """Calls a transform with one image after another, from any number of threads.

    Each thread has a copy of the transform of its own, made by cloudpickle. All generators that the copy may draw from
    are seeded before each image from (seed, epoch, index, occurrence), as `lk.make_loader` does it.

    Transforms of Albumentations and of torchvision's v2 run in all threads at once, since each copy draws from
    generators that it alone has. So do functions and classes of the user's own whose code names nothing that draws from
    the global ones (`random`, `numpy.random`, torch's), as `labkit.loading.drawing` finds. Any other may draw from
    these, while other threads draw from them, too: `BatchLoader` refuses it. If it does not draw from them, state that
    by `transform.draws_globally = False`; `lk.make_loader` takes it as it is, in whose workers nothing else draws.

    Args:
        transform: An Albumentations transform, called with `image=`, uint8 (H, W, 3). Or a function or another object,
            called with a uint8 tensor (3, H, W) with memory of its own. It returns an image of the same height, width
            and dtype: a tensor or array (3, H, W) or (H, W, 3).
        seed: Of all draws.

    Attributes:
        drawn_by: What in it draws from the global generators, or may, such as "`random.random`"; "" if nothing does.
        shares_generator: Whether it draws from a generator that all its copies share, such as a variable of a module.

    Raises:
        TypeError: `transform` cannot be called, or cannot be copied.

    >>> import numpy as np
    >>> from labkit.loading.own_transform import OwnTransform
    >>> brighter = OwnTransform(lambda image: image.clamp(max=235) + 20)
    >>> brighter.apply(np.zeros((2, 2, 3), np.uint8), epoch=0, index=0).max()
    np.uint8(20)
    """

    def __init__(self, transform: Any, seed: int = 0):
        import cloudpickle  # unlike pickle, it handles classes and lambdas from a notebook's cells

        require_callable("transform", transform, "a function, or an Albumentations or torchvision v2 transform")
        self._seed = require_seed(seed)
        self._takes_arrays = any(kind.__module__.startswith("albumentations.") for kind in type(transform).__mro__)
        try:
            self._pickled = cloudpickle.dumps(transform)
            reader = _Names(io.BytesIO(self._pickled))
            copies = reader.load(), pickle.loads(self._pickled)  # noqa: S301 - just written
        except Exception as error:
            raise WrongTypeError(
                f"each thread has a copy of the transform, and {kind_of(transform)} cannot be copied ({error!r:.200}): "
                "open files, locks and connections where they are first used"
            ) from error
        self._is_known = all(name in _KNOWN_NAMES or name.startswith(_KNOWN_PACKAGES) for name in reader.names)
        is_declared = getattr(transform, "draws_globally", None) is False
        self.drawn_by = "" if self._is_known or is_declared else find_drawing(transform)
        is_watched = self._is_known or not (is_declared or self.drawn_by)
        self._has_torchvision = is_watched and any(name.startswith("torchvision.") for name in reader.names)
        self._is_of_pillow = any(name.startswith(_OF_PILLOW) for name in reader.names)
        generators = [find_generators([copy]) for copy in copies]
        self.shares_generator = any(one is other for one in generators[0] for other in generators[1])
        self._local = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_local"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _local=threading.local())

    def apply(self, image: np.ndarray, epoch: int, index: int, occurrence: int = 0) -> np.ndarray:
        """The transformed image, uint8 (H, W, 3), contiguous: to be read before the same thread calls again.

        Args:
            image: uint8 (H, W, 3), contiguous. An Albumentations transform may write into it, and may return it.
            epoch, index, occurrence: What the draws depend on: the number of the epoch and of the image, and how many
                times the image came before in this epoch.

        Raises:
            TypeError, ValueError: the transform returned something else than such an image. What it raises itself
                passes, with a note of what it was called with.
        """
        numbers: tuple[int, ...] = self._seed, epoch, index
        if occurrence:
            numbers += AGAIN, occurrence
        copy = getattr(self._local, "copy", None)
        if copy is None:
            copy = self._local.copy = _Copy(self)
        return copy.apply(image, numbers)


class _Copy:
    """A thread's own copy of a transform, with its generators."""

    def __init__(self, own: OwnTransform):
        self._transform = pickle.loads(own._pickled)  # noqa: S301 - written by the same OwnTransform
        self._generators = find_generators([self._transform])
        self._own = own
        self._mode = _OwnDraws() if own._has_torchvision else None
        self._planes = self._merged = np.empty(0, np.uint8)  # kept, since new memory costs more than writing it

    def apply(self, image: np.ndarray, numbers: tuple[int, ...]) -> np.ndarray:
        own = self._own
        if not own._takes_arrays:
            given: Any = torch.from_numpy(self._planes_of(image))
        else:  # Albumentations' own keep no image
            given = image if own._is_known else image.copy()
        try:
            if self._mode:
                seed_generator(self._mode.generator, derived_seed(*numbers))
                with self._mode:
                    result = self._call(given, numbers)
            else:
                result = self._call(given, numbers)
        except Exception as error:
            height, width, _ = image.shape
            kind = f"array ({height}, {width}, 3)" if own._takes_arrays else f"tensor (3, {height}, {width})"
            if own._is_of_pillow:
                raise WrongTypeError(
                    f"the transform fails ({type(error).__name__}: {error!s:.200}) with a uint8 {kind}: those of timm, "
                    "and torchvision's before v2, are of PIL images. Use torchvision.transforms.v2 or Albumentations, "
                    "without crop, resize, ToTensor and Normalize, which BatchLoader does; or take lk.PILDataset and "
                    "lk.make_loader with the transform as it is"
                ) from error
            error.add_note(f"raised by the transform, called with a uint8 {kind}")
            raise
        array, is_planes = _checked(result, image.shape, own._takes_arrays)
        if not is_planes:
            return array
        if self._merged.shape != image.shape:
            self._merged = np.empty(image.shape, np.uint8)
        return cv2.merge(list(array), dst=self._merged)

    def _planes_of(self, image: np.ndarray) -> np.ndarray:
        """A copy of an image as planes of red, green and blue, on which torchvision is up to twice as fast."""
        shape = (3, *image.shape[:2])
        if not self._own._is_known or self._planes.shape != shape:  # torchvision's own keep no image
            self._planes = np.empty(shape, np.uint8)
        cv2.split(image, list(self._planes))
        return self._planes

    def _call(self, given: Any, numbers: tuple[int, ...]) -> Any:
        for position, generator in enumerate(self._generators):
            seed_generator(generator, derived_seed(*numbers, position))
        return self._transform(image=given)["image"] if self._own._takes_arrays else self._transform(given)


class _OwnDraws(TorchFunctionMode):
    """Lets torch's functions draw from a generator of this thread's own what they would draw from the global one."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in _DRAWS:  # of nearly all calls, so it does no more than it must
            return function(*args, **kwargs) if kwargs else function(*args)
        kwargs = kwargs or {}
        if function in _DRAWS_LIKE:
            return _DRAWS_LIKE[function](torch.empty_like(*args, **kwargs), generator=self.generator)
        return function(*args, **kwargs | {"generator": kwargs.get("generator") or self.generator})


class _Names(pickle.Unpickler):
    """Notes the modules and names of the classes and functions that a pickle needs."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self.names: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if not isinstance(found, torch.dtype):
            self.names.add(f"{module}.{name}")
        return found


def _checked(result: Any, shape: tuple[int, ...], takes_arrays: bool) -> tuple[np.ndarray, bool]:
    """What a transform returned, as a contiguous array, and whether it is in planes; or an error with the remedy."""
    height, width, _ = shape
    planes, is_tensor = (3, height, width), isinstance(result, Tensor)
    is_array = isinstance(result, np.ndarray) or (is_tensor and result.device.type == "cpu")
    if not is_array or str(result.dtype) not in ("uint8", "torch.uint8") or tuple(result.shape) not in (shape, planes):
        raise _refusal(result, shape, planes)
    array = np.ascontiguousarray(result.numpy() if is_tensor else result)
    return array, array.shape == planes and (planes != shape or is_tensor or not takes_arrays)


def _refusal(result: Any, shape: tuple[int, ...], planes: tuple[int, ...]) -> Exception:
    what, advice = f"an object of type {kind_of(result)}", ["return a tensor or an array"]
    is_image = isinstance(result, Tensor | np.ndarray)
    if is_image:
        what, advice = f"{result.dtype} {tuple(result.shape)}", []
        if isinstance(result, Tensor) and result.device.type != "cpu":
            what, advice = f"{what} on {result.device}", ["leave the tensor on the CPU"]
        if "uint8" not in str(result.dtype):
            advice.append("leave ToDtype, ToFloat and Normalize out: BatchLoader has dtype=, mean= and std= for that")
        if tuple(result.shape) not in (shape, planes):
            advice.append(
                "keep the size and the three channels: BatchLoader has cropped the image to its size=, so leave out "
                "RandomResizedCrop, Resize and the like"
            )
    return (ArgumentError if is_image else WrongTypeError)(
        f"the transform must return the image as uint8, {planes} or {shape}; it returned {what}: {'; '.join(advice)}"
    )
