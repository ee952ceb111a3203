"""Reference experiments for notebooks 11b and 13: the limits of a GPU, and loaders that come close to them."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from labkit.core import Scale, labkit_home
from labkit.data import ImageDataset, decode, labels_of
from labkit.data.stores import FolderStore
from labkit.measure import with_step
from labkit.peers import Work, missing_modules
from labkit.peers.adapters import PEERS_HERE as DALI
from labkit.pipeline import decode_limit, make_augment
from labkit.pipeline.batch_loader import BatchLoader
from labkit.pipeline.loader import LoaderConfig, make_loader
from labkit.teach.reference.experiments import Experiment, Factory, ensure, move_to

_MAX_MEAN_DIFFERENCE = 3.0  # of 255: decoders may enlarge chroma and round differently


def copying(device: torch.device, scale: Scale) -> Experiment:
    """uint8 batches copied to the device: pageable, page-locked, without waiting, and as one block.

    The last is the limit for anything that starts in memory. An image has 3 x 224 x 224 bytes.
    """
    n_batches = 8
    pageable = torch.randint(256, (n_batches, scale.batch_size, 3, 224, 224), dtype=torch.uint8)
    pinned = pageable.pin_memory() if device.type == "cuda" else pageable
    block = torch.empty_like(pageable, device=device)
    batches: dict[str, Factory] = {
        "pageable": partial(_copy_batches, pageable, device, non_blocking=False),
        "pinned": partial(_copy_batches, pinned, device, non_blocking=False),
        "pinned, non_blocking": partial(_copy_batches, pinned, device, non_blocking=True),
        "bandwidth: one block": lambda: iter([block.copy_(pinned, non_blocking=True)]),
    }

    def check() -> None:
        for label, make in batches.items():
            copied = torch.stack(list(make())).cpu().view_as(pageable)
            ensure(torch.equal(copied, pageable), f"{label}: the copy differs from the original")

    n_times = max(1, 16 * scale.n_photos // (n_batches * scale.batch_size))
    variants = {label: partial(_count_copies, make, n_times) for label, make in batches.items()}
    return Experiment("11 copy to the GPU", "pageable", variants, check)


def _copy_batches(batches: Tensor, device: torch.device, *, non_blocking: bool) -> Iterator[Tensor]:
    return (batch.to(device, non_blocking=non_blocking) for batch in batches)


def _count_copies(make: Callable[[], Iterable[Tensor]], n_times: int) -> Iterator[int]:
    for _ in range(n_times):
        for copied in make():
            yield copied.shape[:-3].numel()


def nvjpeg(store: FolderStore, device: torch.device, scale: Scale) -> Experiment:
    """JPEGs decoded by the GPU, a batch per call, beside the CPU decoder's limit and the whole CPU path."""
    encoded = [torch.frombuffer(bytearray(store.read(key)), dtype=torch.uint8) for key in store.keys()]  # noqa: SIM118
    batches = [encoded[start : start + scale.batch_size] for start in range(0, len(encoded), scale.batch_size)]
    loader = BatchLoader(store, batch_size=scale.batch_size)
    augment = make_augment("light", "v2", part="geometry")

    def decode_batch(batch: list[Tensor]) -> list[Tensor]:
        from torchvision.io import ImageReadMode, decode_jpeg

        return decode_jpeg(batch, mode=ImageReadMode.RGB, device=device)

    def crop_batch(batch: list[Tensor]) -> Tensor:
        return torch.stack([augment(image) for image in decode_batch(batch)])

    def check() -> None:
        for key, image in zip(store.keys(), decode_batch(batches[0]), strict=False):
            expected = decode(store.read(key)).float()
            ensure(image.shape == expected.shape, f"{key}: {tuple(image.shape)} and {tuple(expected.shape)}")
            difference = (image.cpu().float() - expected).abs().mean().item()
            ensure(difference < _MAX_MEAN_DIFFERENCE, f"{key}: the two decoders differ by {difference:.1f} of 255")
        ours, _ = next(iter(loader))
        theirs = crop_batch(batches[0])
        ensure(theirs.shape == ours.shape, f"{tuple(theirs.shape)} and {tuple(ours.shape)}")
        ensure(theirs.dtype == ours.dtype, f"{theirs.dtype} and {ours.dtype}")

    limit = decode_limit(store)
    variants: dict[str, Factory] = {
        "BatchLoader, copied": partial(map, move_to(device, non_blocking=True), loader),
        "BatchLoader": lambda: loader,
        "decode limit of the CPU": lambda: limit,
        "nvJPEG, decoding alone": lambda: (len(decode_batch(batch)) for batch in batches),
        "nvJPEG, cropped on the GPU": lambda: map(crop_batch, batches),
    }
    return Experiment("11 nvJPEG", "BatchLoader, copied", variants, check)


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
