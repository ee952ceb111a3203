"""Judges of what learners build around a device: batches copied ahead, MixUp, and workers' random numbers."""

import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from labkit.course.exercises import _expect
from labkit.course.readbacks import count_readbacks
from labkit.simulation.context import simulated_cuda
from labkit.simulation.simulated_device import SimulatedDevice

_N_BATCHES, _N_ITEMS = 12, 4096
_STEP_S, _COPY_S = 5e-3, 2e-3


def copies_ahead(prefetched: Callable[[Iterable[dict[str, Any]]], Iterator[dict[str, Any]]]) -> None:
    """Judge `prefetched(loader)` for nested dicts: whole, in order, without a race, beside the steps."""
    free_running = _Training(prefetched, reads_loss=False)
    numbers, n_ahead, races = free_running.numbers, free_running.n_ahead, free_running.races
    _expect(free_running.on_device, "a batch came that is not on the device")
    _expect(free_running.nested_on_device, "tensors in a dict within the batch are not on the device")
    _expect(len(numbers) != _N_BATCHES - 1, f"{len(numbers)} of {_N_BATCHES} batches came: the last one is left behind")
    _expect(len(numbers) == _N_BATCHES, f"{len(numbers)} batches came, and {_N_BATCHES} were loaded")
    _expect(free_running.names == [f"{n}.jpg" for n in range(_N_BATCHES)], "strings came with another batch's tensors")
    _expect(free_running.is_kept, "it changes the loader's own dicts, which others may keep: make new ones")
    wrong = sum(number != right for right, number in enumerate(numbers))
    pixels = f"{wrong} of {_N_BATCHES} steps trained on other pixels than their batch's: " if wrong else "a race: "
    for race in races:
        _expect(race.second == "copy to device", f"{pixels}the step does not wait for its copy (`wait_stream`)")
        missing = "memory that a step has yet to read is given to the next copy (`record_stream`)"
        _expect(False, f"{pixels}{missing}")
    _expect(numbers == list(range(_N_BATCHES)), f"the batches come as {numbers}")
    _expect(n_ahead <= 3, f"{n_ahead} batches were loaded before the first step: copy only the next one ahead")
    step_s = _Training(prefetched, reads_loss=True).step_s
    _expect(
        step_s < _STEP_S + _COPY_S / 2,
        f"a step takes {1e3 * step_s:.1f} ms, its computing {1e3 * _STEP_S:.0f} and its copy {1e3 * _COPY_S:.0f}: "
        "nothing overlaps. Before a batch is handed out, queue the next one's copy on the other stream, "
        "`non_blocking`, and do not let this step wait for it",
    )


class _Training:
    """A training on the simulated device with batches that hold their own number, and what was seen of it."""

    def __init__(self, prefetched: Any, *, reads_loss: bool):
        self.n_loaded, self.n_ahead, self.on_device, self.nested_on_device = 0, 0, True, True
        self.names: list[str] = []
        self._loaded: list[Any] = []
        with simulated_cuda(SimulatedDevice(pcie_bytes_per_s=4 * _N_ITEMS / _COPY_S)) as cuda:
            sums: list[Tensor] = []
            for batch in prefetched(self._load()):
                self.n_ahead = self.n_ahead or self.n_loaded
                self.on_device &= batch["images"].is_cuda
                self.nested_on_device &= batch["target"]["of"]["mask"].is_cuda
                self.names.append(batch["name"])
                torch.cuda._sleep(round(_STEP_S * cuda.device.clock_hz))
                sums.append(batch["images"].sum() + batch["target"]["of"]["mask"].sum())
                del batch  # so that its memory is free as soon as it can be
                if reads_loss:
                    sums[-1].item()
            self.numbers = [round(float(each)) // _N_ITEMS for each in sums]
            tensors = [(each["images"], each["target"]["of"]["mask"]) for each in self._loaded]
            self.is_kept = not any(tensor.is_cuda for both in tensors for tensor in both)
            self.races = cuda.races
            frame = cuda.timeline()
        self.step_s = float(frame.loc[frame["kind"] == "sleep", "end_s"].diff().mean())

    def _load(self) -> Iterator[dict[str, Any]]:
        for number in range(_N_BATCHES):
            self.n_loaded += 1
            values = torch.full((_N_ITEMS,), float(number)).pin_memory()
            images, mask = values.chunk(2)
            self._loaded.append({"images": images, "target": {"of": {"mask": mask}}, "name": f"{number}.jpg"})
            yield self._loaded[-1]


def mixes_without_waiting(mixup: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]) -> None:
    """Judge `mixup(images, labels, num_classes)`: labels follow the pixels, and the host never waits for the device."""
    n, busy_s = 16, 0.01
    with simulated_cuda() as cuda:
        # Image number i is 1 at pixel i, and 0 elsewhere: a mixed image shows how much of which image is in it.
        images = torch.eye(n).view(n, 1, 2, 8).expand(n, 3, 2, 8).clone().cuda()
        order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
        labels, before = order.cuda(), images.clone()
        torch.cuda.synchronize()
        torch.cuda._sleep(round(busy_s * cuda.device.clock_hz))
        started_s = cuda.now_s
        (mixed, targets), n_reads = _mixed(mixup, images, labels, n)
        waited_s = cuda.now_s - started_s
        again = mixup(images, labels, n)[0].cpu()
        is_kept = torch.equal(images.cpu(), before.cpu())
        shares, targets = mixed.cpu()[:, 0].flatten(1), targets.cpu()
        is_checked = n_reads and not _reads_unchecked(mixup, images, labels, n)
    told = "torch.distributions reads values back to check its arguments: pass `validate_args=False`"
    _expect(not is_checked, told)
    _expect(not n_reads, f"the host reads {n_reads} value(s) back: no `.item()`, `float()`, mask or `.cpu()`")
    _expect(
        waited_s < busy_s / 2,
        "the host waits for a copy: a tensor made on the host, such as `torch.randperm(n)` or NumPy's draws, goes to "
        "the device from pageable memory. Draw it there: `device=images.device`",
    )
    _expect(is_kept, "it overwrites the batch that it was given")
    _expect(mixed.shape == (n, 3, 2, 8), f"images of shape {tuple(mixed.shape)}, not {(n, 3, 2, 8)}")
    _expect(targets.shape == (n, n), f"targets of shape {tuple(targets.shape)}, not {(n, n)}: a share for each class")
    _expect(torch.allclose(shares.sum(1), torch.ones(n), atol=1e-4), "the shares of two images do not add up to 1")
    low, high = shares.aminmax()
    _expect(low > -1e-4 and high < 1 + 1e-4, f"shares go from {low:.2f} to {high:.2f}, not from 0 to 1 as torch.rand's")
    own = shares.diagonal()
    _expect((own < 1).sum() > n / 2, "images are mixed with themselves")
    _expect(len(own[own < 1].unique()) > n / 2, "all images have the same share: draw one for each")
    _expect(torch.allclose(targets[:, order], shares, atol=1e-4), "the labels' shares are not those of the pixels")
    _expect(not torch.equal(again[:, 0].flatten(1), shares), "a second call mixes the same")


def _mixed(mixup: Callable[..., Any], *given: Any) -> tuple[Any, int]:
    try:
        return count_readbacks(mixup, *given)
    except RuntimeError as error:
        told = "beside images, shares have the shape (n, 1, 1, 1): `share.view(-1, 1, 1, 1)`"
        is_shape = "must match the size" in str(error) or "broadcast" in str(error)
        _expect(not is_shape, f"{error}: {told}")
        raise


def _reads_unchecked(mixup: Callable[..., Any], *given: Any) -> int:
    """The values that are read back where torch.distributions does not check its arguments."""
    checks = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        return count_readbacks(mixup, *given)[1]
    finally:
        Distribution.set_default_validate_args(checks)


class _Flipped(Dataset):
    """A small picture that Albumentations flips twice, with what its two generators draw in the first two channels."""

    def __init__(self) -> None:
        import albumentations as A

        class Drawn(A.ImageOnlyTransform):
            def get_params(self) -> dict[str, Any]:
                return {"drawn": (self.py_random.random(), self.random_generator.random())}

            def apply(self, img: np.ndarray, drawn: tuple[float, float], **others: Any) -> np.ndarray:
                return np.dstack([np.full_like(img[..., 0], each) for each in drawn] + [img[..., 2]])

        self.compose = A.Compose([A.HorizontalFlip(p=0.5), A.VerticalFlip(p=0.5), Drawn(p=1)])

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> np.ndarray:
        return self.compose(image=np.repeat(np.arange(4, dtype=np.float32).reshape(2, 2, 1), 3, 2))["image"]


class _Half(_Flipped):
    """Half of it, with a pipeline of its own."""

    def __len__(self) -> int:
        return 32


_PLAIN = "a data set with a pipeline"


def draws_anew(start: Callable[[int], None]) -> None:
    """Judge a `worker_init_fn` for Albumentations: draws differ between pipelines, workers and epochs; seeds repeat."""
    with suppress(Exception):  # it fails outside of a worker, unless it is not written yet
        start(0)
    both_halves: Dataset = ConcatDataset([_Half(), Subset(_Half(), range(32))])
    for dataset in (_Flipped(), Subset(_Flipped(), range(64)), both_halves):
        of = f"a {type(dataset).__name__}" if dataset is both_halves or isinstance(dataset, Subset) else _PLAIN
        first, again = (_two_epochs(dataset, start, of) for _ in range(2))
        for channel, generator in enumerate(("`random.Random`", "NumPy's generator")):
            drawn = first[:, 0, 0, channel]
            for part in (drawn[:32], drawn[32:64]) if dataset is both_halves else (drawn[:64],):
                told = f"{len(np.unique(part))} of {len(part)} draws of an epoch from {generator} differ"
                _expect(_all_differ(part), f"workers of {of} draw the same: {told}")
            told = f"{len(np.unique(drawn[:64]))} of 64 draws of an epoch from {generator} differ"
            near = "the seeds of two workers differ by 1, so a seed + 1 meets another worker's"
            _expect(_all_differ(drawn[:64]), f"two pipelines of {of} draw the same: {told}; {near}")
            told = f"the second epoch of {of} draws from {generator} what the first one drew"
            _expect(_all_differ(drawn), f"{told}: a worker's number does not change")
        corners = {int(picture[..., 2].argmin()) for picture in first}
        _expect(
            len(corners) == 4,
            f"a pixel comes to {len(corners)} of 4 corners: both flips draw from the same seed. Use `set_random_state`",
        )
        _expect(np.array_equal(first, again), "the same seed of torch gives other draws: use `torch.initial_seed()`")


def _all_differ(drawn: np.ndarray) -> bool:
    """But for chance: two of a hundred draws of 32 bits hardly ever agree."""
    return len(np.unique(drawn)) >= len(drawn) - 1


def _two_epochs(dataset: Dataset, start: Any, of: str) -> np.ndarray:
    generator = torch.Generator().manual_seed(0)  # from which DataLoader draws its workers' seeds
    with warnings.catch_warnings(action="ignore"):  # of more workers than cores
        loader = DataLoader(
            dataset, 8, num_workers=3, multiprocessing_context="fork", worker_init_fn=start, generator=generator
        )
        try:
            return torch.cat([batch for _ in range(2) for batch in loader]).numpy()
        except Exception as error:  # with the worker's traceback, whose last line says what is wrong
            said = str(error).strip().splitlines()[-1]
            # torch's error holds itself and the loader's workers, each of which a later collection waits 5 s for.
            traceback.clear_frames(error.__traceback__)
    raise AssertionError(f"with {of}, a worker raised {said}")
