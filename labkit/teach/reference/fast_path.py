"""What a CUDA machine records for notebooks 11 and 13: the limits of a GPU, and who comes close to them."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from labkit.core import Scale, labkit_home, map_tensors
from labkit.data import ImageDataset, decode, labels_of
from labkit.data.stores import FolderStore
from labkit.peers import Peer, Work
from labkit.peers.adapters import PEERS_HERE as DALI
from labkit.pipeline import decode_limit, make_augment
from labkit.pipeline.batch_loader import BatchLoader
from labkit.pipeline.loader import LoaderConfig, make_loader
from labkit.teach.reference.experiments import Experiment, Factory, ensure

_MOST_DIFFERENCE = 3.0  # of 255, on average: decoders may differ in how they enlarge chroma and round


def copying(device: torch.device, scale: Scale) -> Experiment:
    """uint8 batches from memory to the device: as they are, page-locked, without waiting, and all in one piece.

    The last is the limit: nothing that starts in memory arrives faster. Bytes an image: 3 x 224 x 224.
    """
    n_batches = 8
    pageable = torch.randint(256, (n_batches, scale.batch_size, 3, 224, 224), dtype=torch.uint8)
    pinned = pageable.pin_memory() if device.type == "cuda" else pageable
    block = torch.empty_like(pageable, device=device)
    batches = {
        "pageable": partial(_copies, pageable, device, non_blocking=False),
        "pinned": partial(_copies, pinned, device, non_blocking=False),
        "pinned, non_blocking": partial(_copies, pinned, device, non_blocking=True),
        "bandwidth: one block": lambda: iter([block.copy_(pinned, non_blocking=True)]),
    }

    def check() -> None:
        for label, make in batches.items():
            copied = torch.stack(list(make())).cpu().view_as(pageable)
            ensure(torch.equal(copied, pageable), f"{label}: what arrives is not what was sent")

    n_times = max(1, 16 * scale.n_photos // (n_batches * scale.batch_size))
    variants = {label: partial(_counts, make, n_times, scale.batch_size) for label, make in batches.items()}
    return Experiment("11 copy to the GPU", "pageable", variants, check)


def _copies(batches: Tensor, device: torch.device, *, non_blocking: bool) -> Iterator[Tensor]:
    return (batch.to(device, non_blocking=non_blocking) for batch in batches)


def _counts(make: Callable[[], Iterable[Tensor]], n_times: int, batch_size: int) -> Iterator[int]:
    for _ in range(n_times):
        for copied in make():
            yield copied.shape[:-3].numel()


def nvjpeg(store: FolderStore, device: torch.device, scale: Scale) -> Experiment:
    """JPEG decoded by the GPU, a batch a call, beside the limit of the CPU's decoder and the whole CPU path."""
    encoded = [torch.frombuffer(bytearray(store.read(key)), dtype=torch.uint8) for key in store.keys()]  # noqa: SIM118
    parts = [encoded[start : start + scale.batch_size] for start in range(0, len(encoded), scale.batch_size)]
    loader = BatchLoader(store, batch_size=scale.batch_size)
    crop = make_augment("light", "v2", part="geometry")

    def decoded(part: list[Tensor]) -> list[Tensor]:
        from torchvision.io import ImageReadMode, decode_jpeg

        return decode_jpeg(part, mode=ImageReadMode.RGB, device=device)

    def cropped(part: list[Tensor]) -> Tensor:
        return torch.stack([crop(image) for image in decoded(part)])

    def check() -> None:
        for key, image in zip(store.keys(), decoded(parts[0]), strict=False):
            expected = decode(store.read(key)).float()
            ensure(image.shape == expected.shape, f"{key}: {tuple(image.shape)} and {tuple(expected.shape)}")
            difference = (image.cpu().float() - expected).abs().mean().item()
            ensure(difference < _MOST_DIFFERENCE, f"{key}: the two decoders differ by {difference:.1f} of 255")
        ours, _ = next(iter(loader))
        theirs = cropped(parts[0])
        ensure(theirs.shape == ours.shape, f"{tuple(theirs.shape)} and {tuple(ours.shape)}")
        ensure(theirs.dtype == ours.dtype, f"{theirs.dtype} and {ours.dtype}")

    limit = decode_limit(store)
    variants = {
        "BatchLoader, copied": partial(_moved, loader, device),
        "BatchLoader": lambda: loader,
        "decode limit of the CPU": lambda: limit,
        "nvJPEG, decoding alone": lambda: (len(decoded(part)) for part in parts),
        "nvJPEG, cropped on the GPU": lambda: (cropped(part) for part in parts),
    }
    return Experiment("11 nvJPEG", "BatchLoader, copied", variants, check)


def peers_on_gpu(store: FolderStore, device: torch.device, scale: Scale) -> Experiment:
    """Epochs of uint8 batches on the device: DataLoader, DALI on the CPU and on the GPU if installed, BatchLoader."""
    augment = make_augment("light", "v2", part="geometry")
    config = LoaderConfig(batch_size=scale.batch_size)
    dataloader = make_loader(ImageDataset(store, transform=augment), config, shuffle=True)
    work = Work(store.root, labkit_home() / "peers", batch_size=scale.batch_size)
    threaded = BatchLoader(store, batch_size=scale.batch_size)
    makers: dict[str, Factory] = {
        "DataLoader": lambda: dataloader,
        "BatchLoader": lambda: threaded,
        **{peer.name: partial(peer.loader, work) for peer in installed_dali()},
    }
    variants = {label: partial(_moved_by, make, device) for label, make in makers.items()}

    def check() -> None:
        _, expected = labels_of(store.keys())
        for label, make in variants.items():
            found = []
            for images, labels in make():
                wanted = (len(labels), 3, 224, 224)
                ensure(images.shape == wanted, f"{label} gives {tuple(images.shape)}, not {wanted}")
                ensure(images.dtype == torch.uint8, f"{label} gives {images.dtype}")
                ensure(images.device.type == device.type, f"{label} leaves its batches on the {images.device.type}")
                found += labels.tolist()
            ensure(sorted(found) == sorted(expected.tolist()), f"{label}: not every image came once, with its label")

    return Experiment("13 peers on a GPU", "DataLoader", variants, check, dataloader.close)


def installed_dali() -> tuple[Peer, ...]:
    """DALI's adapters that can run here."""
    try:
        import nvidia.dali  # noqa: F401
    except ImportError:
        return ()
    return DALI


def _moved_by(make: Factory, device: torch.device) -> Iterator[Any]:
    return _moved(make(), device)


def _moved(loader: Iterable[Any], device: torch.device) -> Iterator[Any]:
    return (map_tensors(batch, lambda item: item.to(device, non_blocking=True)) for batch in loader)
