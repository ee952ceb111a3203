"""Reference runs on a GPU: the experiments of notebooks 03, 06, 07 and 13 that need one.

`python -m labkit reference` on a CUDA machine checks and measures them, and writes `<env_id>.csv` (runs) and `.json`
(machine) to `notebooks/reference/`. It needs no Jupyter.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from labkit.data.dataset import ImageDataset
from labkit.data.labels import labels_of
from labkit.data.samples import make_photos
from labkit.data.stores import FolderStore
from labkit.errors import ArgumentError, OperationError
from labkit.loading.augment import RECIPES, make_augment
from labkit.loading.batch_loader import BatchLoader
from labkit.loading.mix import cutmix, mixup
from labkit.loading.prefetch import CUDAPrefetcher
from labkit.loading.torch_loader import Loader, LoaderConfig, make_loader
from labkit.measure.compare import compare
from labkit.measure.steady import ReplayLoader, with_step
from labkit.peers.adapters.dali import PEERS_HERE as DALI
from labkit.peers.peer import Work, missing_modules
from labkit.simulation.context import simulated_cuda
from labkit.simulation.simulated_device import is_simulated
from labkit.util.files import write_atomic
from labkit.util.machine import NOTEBOOK_FOLDER, Scale, env_id, environment, labkit_home, photo_root, scale
from labkit.util.tensor_trees import move_tensors

FOLDER = NOTEBOOK_FOLDER / "reference"
Factory = Callable[[], Iterable[Any]]


@dataclass(frozen=True)
class Experiment:
    """Arguments of `compare`, and a check of what must be true before timing.

    Args:
        name: As in `compare(experiment=...)`.
        baseline: One of `variants`.
        variants: Label -> factory of an iterable of batches.
        check: Raises AssertionError if the variants do not do the same work.
        close: Ends workers.
    """

    name: str
    baseline: str
    variants: Mapping[str, Factory]
    check: Callable[[], None]
    close: Callable[[], None] = lambda: None

    def run(self, rounds: int | None = None, *, progress: bool = True) -> pd.DataFrame:
        """Check, `compare`, then close. The runs are no rung of the ladder.

        Raises:
            RuntimeError: the variants do not do the same work; nothing was timed.
        """
        try:
            self.check()
            options: dict[str, Any] = {"experiment": self.name, "progress": progress, "rung": False}
            return compare(self.variants, baseline=self.baseline, rounds=rounds, **options)
        except AssertionError as error:
            raise OperationError(f"{self.name}: the variants do not do the same work: {error}") from error
        finally:
            self.close()


def ensure(condition: bool | Tensor, message: str) -> None:
    """`assert`, also under `python -O`: runs of variants that do different work must not be stored."""
    if not condition:
        raise AssertionError(message)


def augment_on_device(device: torch.device, scale: Scale, recipe: str, *, compiled: bool) -> Experiment:
    """Colors by v2 (one draw per batch) and by Kornia (one per image), eager and compiled, of uint8 crops there."""
    batch = _make_pictures(scale.batch_size, device)
    kornia = make_augment(recipe, "kornia", part="photometry").to(device)
    variants: dict[str, Callable[[Any], Tensor]] = {
        "v2, one draw per batch": make_augment(recipe, "v2", part="photometry"),
        "Kornia": kornia,
    }
    if compiled:
        variants["Kornia, compiled"] = torch.compile(kornia)
    for augment in variants.values():
        augment(batch)  # compiles

    def check() -> None:
        for label, augment in variants.items():
            result = augment(batch)
            ensure(result.shape == (len(batch), 3, 224, 224), f"{label} gives {tuple(result.shape)}")
            ensure(result.isfinite().all(), f"{label} gives values that are not finite")
            distinct = len({row.numpy().tobytes() for row in augment(batch[:1].expand_as(batch)).cpu()})
            expected = 1 if label.startswith("v2") else len(batch)
            ensure(distinct == expected, f"{label}: {distinct} different results of one picture, not {expected}")

    factories = {label: partial(_repeat, _count_batches(scale), augment, batch) for label, augment in variants.items()}
    return Experiment(f"06 {recipe} recipe on the device", "v2, one draw per batch", factories, check)


def mixing(device: torch.device, scale: Scale) -> Experiment:
    """A float batch, mixed by torchvision, with one draw, and by labkit, with a draw for each image."""
    from torchvision.transforms import v2

    batch = _make_pictures(scale.batch_size, device).float().div_(255)
    labels = torch.arange(len(batch), device=device) % 10
    variants = {
        "v2.MixUp": v2.MixUp(num_classes=10),
        "lk.mixup": partial(mixup, num_classes=10, per_sample=True),
        "v2.CutMix": v2.CutMix(num_classes=10),
        "lk.cutmix": partial(cutmix, num_classes=10, per_sample=True),
    }

    def check() -> None:
        before = batch.clone()
        for label in ("lk.mixup", "lk.cutmix"):
            images, targets = variants[label](batch, labels)
            ensure(torch.allclose(targets.sum(1), torch.ones_like(targets[:, 0])), f"{label}: targets do not sum to 1")
            ensure(images.shape == batch.shape, f"{label} gives {tuple(images.shape)}")
        ensure(torch.equal(batch, before), "the input was changed")
        partner = torch.arange(len(batch), device=device).roll(1)
        own, _ = mixup(batch, labels, num_classes=10, lam=0.3, partner=partner)
        theirs = variants["v2.MixUp"].transform(batch, {"labels": labels, "batch_size": len(batch), "lam": 0.3})
        ensure(torch.allclose(own, theirs, atol=1e-6), "lk.mixup and v2.MixUp differ for the same draw")

    n_steps = 4 * _count_batches(scale)
    factories = {label: partial(_repeat, n_steps, mix, batch, labels) for label, mix in variants.items()}
    return Experiment("06 mixing on the device", "v2.CutMix", factories, check)


def who_augments(store: Any, device: torch.device, scale: Scale, recipe: str = "heavy") -> Experiment:
    """The CPU does everything, with Albumentations, or decodes and crops while the device changes colors."""
    on_cpu, for_device = (
        _make_loader(store, scale, make_augment(recipe, "albumentations", part=part)) for part in ("all", "geometry")
    )
    photometry = make_augment(recipe, "kornia", part="photometry").to(device)

    def check() -> None:
        (ours, labels), (crops, same_labels) = next(iter(on_cpu)), next(iter(for_device))
        theirs = photometry(crops.to(device))
        ensure(ours.shape == theirs.shape, f"{tuple(ours.shape)} and {tuple(theirs.shape)}")
        ensure(torch.equal(labels, same_labels), "the two loaders give different samples")
        # Colors are drawn at random, so compare only the steps without a random draw.
        plain = replace(RECIPES[recipe], jitter=0, gray=0, blur=0, solarize=0)
        ours, theirs = (
            make_augment(plain, "v2", part="photometry")(crops.to(device)),
            make_augment(plain, "kornia", part="photometry").to(device)(crops.to(device)),
        )
        ensure(torch.allclose(ours, theirs, atol=1e-3), "the two normalize differently")

    move = move_to(device, non_blocking=True)
    return Experiment(
        "06 who augments", "Albumentations",
        {
            "Albumentations": partial(with_step, on_cpu, move),
            "colors on the device": partial(with_step, for_device, lambda batch: photometry(move(batch)[0])),
            "crops alone": partial(with_step, for_device, move),
        },
        check, partial(_close, on_cpu, for_device),
    )  # fmt: skip


def pinning(store: Any, device: torch.device, scale: Scale) -> Experiment:
    """Loading and copying, without a step: is page-locked memory worth the copy into it?"""
    pageable, pinned = _make_loaders(store, scale)
    move, move_async = (move_to(device, non_blocking=flag) for flag in (False, True))

    def check() -> None:
        pairs = zip(map(move_async, pageable), map(move_async, pinned), strict=True)
        same = all(torch.equal(own, other) for one, two in pairs for own, other in zip(one, two, strict=True))
        ensure(same, "pinned batches differ from pageable ones")

    variants = {
        "pin_memory=False": partial(with_step, pageable, move),
        "pin_memory=True": partial(with_step, pinned, move),
        "pin_memory=True, non_blocking": partial(with_step, pinned, move_async),
    }
    close = partial(_close, pageable, pinned)
    return Experiment("03 pinned memory", "pin_memory=False", variants, check, close)


def overlap(store: Any, device: torch.device, scale: Scale) -> Experiment:
    """Training steps fed in four ways, and their limits: loading alone and computing alone."""
    pageable, pinned = _make_loaders(store, scale)
    move, move_async = (move_to(device, non_blocking=flag) for flag in (False, True))
    step = training_step(device)
    n_batches = len(pinned)
    resident = ReplayLoader(pageable, min(4, n_batches), length=n_batches, device=device)

    def check() -> None:
        sums = []
        for loader in (pageable, pinned, CUDAPrefetcher(pinned, device)):
            loader.set_epoch(0)
            sums.append([int(images.long().sum()) for images, _ in loader])
        ensure(all(epoch == sums[0] for epoch in sums), "the ways of feeding give different batches")

    variants: dict[str, Factory] = {
        "pageable": partial(with_step, pageable, lambda batch: step(move(batch))),
        "pinned": partial(with_step, pinned, lambda batch: step(move(batch))),
        "pinned, non_blocking": partial(with_step, pinned, lambda batch: step(move_async(batch))),
        "prefetched": partial(with_step, CUDAPrefetcher(pinned, device), step),
        "load alone": lambda: pinned,
        "compute alone": partial(with_step, resident, step),
    }
    return Experiment("07 feeding a training step", "pageable", variants, check, partial(_close, pageable, pinned))


def training_step(device: torch.device) -> Callable[[Any], Any]:
    """One step with a uint8 batch on the device: of ResNet-50; without a GPU, of ResNet-18 on pictures shrunk to 32."""
    from torchvision import models

    on_gpu = device.type == "cuda" and not is_simulated()
    model = (models.resnet50 if on_gpu else models.resnet18)(num_classes=10).to(device)
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(batch: Any) -> Tensor:
        images, labels = batch
        images = images.to(torch.float32).div_(255).contiguous(memory_format=torch.channels_last)
        if not on_gpu:
            images = nn.functional.interpolate(images, (32, 32))
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _make_loader(store: Any, scale: Scale, transform: Any, pin_memory: bool | None = None) -> Loader:
    config = LoaderConfig(batch_size=scale.batch_size, pin_memory=pin_memory)
    return make_loader(ImageDataset(store, transform=transform), config, drop_last=True)


def _make_loaders(store: Any, scale: Scale) -> tuple[Loader, Loader]:
    """A pageable and a pinned loader of the same uint8 crops; without CUDA neither pins."""
    crop = make_augment("light", "v2", part="geometry")
    return _make_loader(store, scale, crop, False), _make_loader(store, scale, crop)


def _close(*loaders: Loader) -> None:
    for loader in loaders:
        loader.close()


def _make_pictures(n: int, device: torch.device) -> Tensor:
    coarse = torch.rand(n, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    smooth = nn.functional.interpolate(coarse, (224, 224), mode="bilinear").mul_(255)
    return smooth.to(torch.uint8).to(device)


def _count_batches(scale: Scale) -> int:
    return max(2, scale.n_photos // scale.batch_size)


def _repeat(n: int, function: Callable[..., Any], *args: Any) -> Iterator[Any]:
    return (function(*args) for _ in range(n))


def move_to(device: torch.device, *, non_blocking: bool) -> Callable[[Any], Any]:
    """A function that moves the tensors of a batch to the device."""
    return partial(move_tensors, device=device, non_blocking=non_blocking)


def peers_on_gpu(store: FolderStore, device: torch.device, scale: Scale) -> Experiment:
    """Epochs of uint8 batches on the device: DataLoader, BatchLoader and, if installed, DALI on the CPU and the GPU."""
    augment = make_augment("light", "v2", part="geometry")
    config = LoaderConfig(batch_size=scale.batch_size)
    dataloader = make_loader(ImageDataset(store, transform=augment), config, shuffle=True)
    work = Work(store.root, labkit_home() / "peers", batch_size=scale.batch_size)
    threaded = BatchLoader(store, batch_size=scale.batch_size)
    factories: dict[str, Factory] = {
        "DataLoader": lambda: dataloader,
        "BatchLoader": lambda: threaded,
        **{peer.name: partial(peer.loader, work) for peer in DALI if not missing_modules(peer)},
    }
    move = move_to(device, non_blocking=True)
    variants = {label: lambda make=make: with_step(make(), move) for label, make in factories.items()}

    def check() -> None:
        _, expected = labels_of(store.keys())
        for label, make in factories.items():
            found = []
            for images, labels in map(move, make()):
                shape = (len(labels), 3, 224, 224)
                ensure(images.shape == shape, f"{label} gives {tuple(images.shape)}, not {shape}")
                ensure(images.dtype == torch.uint8, f"{label} gives {images.dtype}")
                ensure(images.device.type == device.type, f"{label} leaves its batches on the {images.device.type}")
                found += labels.tolist()
            ensure(sorted(found) == sorted(expected.tolist()), f"{label}: not every image came once, with its label")

    return Experiment("13 peers on a GPU", "DataLoader", variants, check, dataloader.close)


_MAX_ROUNDS = 7  # all experiments together take less than eight minutes


def record_reference(
    folder: Path = FOLDER, *, device: str = "cuda", simulated: bool = False, say: Callable[[str], None] = lambda _: None
) -> Path:
    """Measure at the current scale; write `<env_id>.json` and `<env_id>.csv`, each as a whole.

    Args:
        folder: Folder for the two files; the package's own folder takes CUDA runs only.
        device: `"cuda"`, or `"cpu"` to rehearse, with a folder of your own.
        simulated: Rehearse the CUDA code on `lk.simulated_cuda()`, with a smaller model and without
            torch.compile. The times are those of the simulation's own work: they say nothing.
        say: Called with a line for each experiment.

    Returns:
        Path of the CSV.

    Raises:
        RuntimeError: no CUDA device, or the variants of an experiment do not do the same work.
        ValueError: `folder` is the package's own, and `device` is not `"cuda"`, or simulated.
    """
    if (device != "cuda" or simulated) and folder.resolve() == FOLDER:
        kind = "a simulated device" if simulated else f"device={device!r}"
        raise ArgumentError(f"runs with {kind} are not reference runs: choose another folder than {folder}")
    with simulated_cuda() if simulated else nullcontext():
        if device == "cuda" and not torch.cuda.is_available():
            raise OperationError(
                "no CUDA device found: run this on a machine that has one, or rehearse it with --simulated and a "
                "--folder of your own"
            )
        return _record(folder, torch.device(device), 1 if simulated else min(_MAX_ROUNDS, scale().rounds), say)


def _record(folder: Path, device: torch.device, rounds: int, say: Callable[[str], None]) -> Path:
    frames, seconds = [], {}
    for experiment in _make_experiments(device, scale()):
        say(f"{experiment.name}: checking, then {rounds} rounds of {len(experiment.variants)} variants")
        start = time.perf_counter()
        frames.append(experiment.run(rounds, progress=False))
        seconds[experiment.name] = round(time.perf_counter() - start, 1)
    path = folder / f"{env_id()}.csv"
    facts = {"environment": environment(), "scale": scale().name, "seconds": seconds}
    # The machine first: without it, nobody could tell where the runs come from.
    write_atomic(path.with_suffix(".json"), json.dumps(facts, indent=1).encode())
    write_atomic(path, pd.concat(frames, ignore_index=True).to_csv(index=False).encode())
    return path


def _make_experiments(device: torch.device, size: Scale) -> Iterator[Experiment]:
    """Makes one at a time, so that memory holds the models and batches of one only."""
    store = FolderStore(make_photos(photo_root("imagenet"), size.n_photos))
    compiled = device.type == "cuda" and not is_simulated()  # in a rehearsal it would take longer than everything else
    yield pinning(store, device, size)
    yield augment_on_device(device, size, "light", compiled=compiled)
    yield augment_on_device(device, size, "heavy", compiled=compiled)
    yield mixing(device, size)
    yield who_augments(store, device, size)
    yield overlap(store, device, size)
    yield peers_on_gpu(store, device, size)
