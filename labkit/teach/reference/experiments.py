"""The experiments of notebooks 03, 06 and 07, which a CUDA machine also records as reference runs."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from labkit.core import Scale, move_tensors
from labkit.data import ImageDataset
from labkit.measure import ReplayLoader, compare, with_step
from labkit.pipeline import RECIPES, CUDAPrefetcher, cutmix, make_augment, mixup
from labkit.pipeline.loader import Loader, LoaderConfig, make_loader
from labkit.pipeline.simulation import is_simulated

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
            return compare(
                self.variants,
                baseline=self.baseline,
                rounds=rounds,
                experiment=self.name,
                progress=progress,
                rung=False,
            )
        except AssertionError as error:
            raise RuntimeError(f"{self.name}: the variants do not do the same work: {error}") from error
        finally:
            self.close()


def ensure(condition: bool | Tensor, message: str) -> None:
    """`assert`, also under `python -O`: runs of variants that do different work must not be stored."""
    if not condition:
        raise AssertionError(message)


def augment_on_device(
    device: torch.device, scale: Scale, recipe: str = "light", *, compiled: bool = True
) -> Experiment:
    """v2 (one draw per batch) against Kornia (one per image), eager and compiled, on uint8 batches on the device."""
    batch = _make_pictures(scale.batch_size, device)
    variants: dict[str, Callable[[Any], Tensor]] = {
        "v2, one draw per batch": make_augment(recipe, "v2"),
        "Kornia": make_augment(recipe, "kornia").to(device),
    }
    if compiled:
        variants["Kornia, compiled"] = torch.compile(make_augment(recipe, "kornia").to(device))
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
    """A float batch, mixed by torchvision, by labkit, and as in write-ups, where the host waits for the GPU."""
    from torchvision.transforms import v2

    batch = _make_pictures(scale.batch_size, device, size=224).float().div_(255)
    labels = torch.arange(len(batch), device=device) % 10
    variants = {
        "v2.MixUp": v2.MixUp(num_classes=10),
        "lk.mixup": partial(mixup, num_classes=10),
        "v2.CutMix": v2.CutMix(num_classes=10),
        "lk.cutmix": partial(cutmix, num_classes=10),
        "write-up's CutMix": partial(writeup_cutmix, num_classes=10),
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


def writeup_cutmix(x: Tensor, y: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """As in write-ups: `int()` of a device tensor waits for the device, and the caller's batch is overwritten."""
    share = torch.distributions.Beta(1.0, 1.0).sample().to(x.device)
    partner = torch.randperm(len(x), device=x.device)
    height, width = x.shape[-2:]
    cut = (1 - share).sqrt()
    rows, columns = int(height * cut), int(width * cut)
    row, column = int(torch.randint(height, (1,), device=x.device)), int(torch.randint(width, (1,), device=x.device))
    top, bottom = max(row - rows // 2, 0), min(row + rows // 2, height)
    left, right = max(column - columns // 2, 0), min(column + columns // 2, width)
    x[:, :, top:bottom, left:right] = x[partner, :, top:bottom, left:right]
    targets = nn.functional.one_hot(y, num_classes).float()
    kept = 1 - (bottom - top) * (right - left) / (height * width)
    return x, kept * targets + (1 - kept) * targets[partner]


def who_augments(store: Any, device: torch.device, scale: Scale, recipe: str = "heavy") -> Experiment:
    """The CPU does everything, or decodes and crops while the device changes colors."""
    config = LoaderConfig(batch_size=scale.batch_size)
    on_cpu = make_loader(ImageDataset(store, transform=make_augment(recipe, "v2")), config, drop_last=True)
    cropped = ImageDataset(store, transform=make_augment(recipe, "v2", part="geometry"))
    for_device = make_loader(cropped, config, drop_last=True)
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
        ensure(torch.allclose(ours, theirs, atol=1e-3), "the two normalise differently")

    move = move_to(device, non_blocking=True)
    return Experiment(
        "06 who augments", "CPU does all",
        {
            "CPU does all": partial(with_step, on_cpu, move),
            "CPU crops, device colors": partial(with_step, for_device, lambda batch: photometry(move(batch)[0])),
            "CPU crops only": partial(with_step, for_device, move),
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


def _make_loaders(store: Any, scale: Scale) -> tuple[Loader, Loader]:
    """A pageable and a pinned loader of the same uint8 crops; without CUDA neither pins."""
    cropped = ImageDataset(store, transform=make_augment("light", "v2", part="geometry"))
    pageable, pinned = (LoaderConfig(batch_size=scale.batch_size, pin_memory=pin) for pin in (False, None))
    return make_loader(cropped, pageable, drop_last=True), make_loader(cropped, pinned, drop_last=True)


def _close(*loaders: Loader) -> None:
    for loader in loaders:
        loader.close()


def _make_pictures(n: int, device: torch.device, size: int = 256) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(n, 3, 16, 16, generator=generator)
    smooth = nn.functional.interpolate(coarse, (size, size), mode="bilinear").mul_(255)
    return smooth.to(torch.uint8).to(device)


def _count_batches(scale: Scale) -> int:
    return max(2, scale.n_photos // scale.batch_size)


def _repeat(n: int, function: Callable[..., Any], *args: Any) -> Iterator[Any]:
    return (function(*args) for _ in range(n))


def move_to(device: torch.device, *, non_blocking: bool) -> Callable[[Any], Any]:
    """A function that moves the tensors of a batch to the device."""
    return partial(move_tensors, device=device, non_blocking=non_blocking)
