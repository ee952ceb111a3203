"""A training as a beginner writes it: photos in folders of classes, PIL, one process. It says how long it waits."""

import argparse
import time

from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from labkit import course

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def make_loader(photos, batch_size=64):
    to_tensor = transforms.Compose(
        [
            transforms.RandomResizedCrop(224),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )
    return DataLoader(datasets.ImageFolder(photos, to_tensor), batch_size, shuffle=True)


def train(loader, step):
    """Train for an epoch. Returns images per second, and the share of the time that the loop waited for batches."""
    batches, n_images, waiting_s = iter(loader), 0, 0.0
    start = time.perf_counter()
    while True:
        asked = time.perf_counter()
        batch = next(batches, None)
        waiting_s += time.perf_counter() - asked
        if batch is None:
            break
        images, labels = batch
        step(
            images, labels
        ).item()  # wait for the device; else the clock would show when Python asks, not what it trains
        n_images += len(images)
    elapsed_s = time.perf_counter() - start
    return n_images / elapsed_s, waiting_s / elapsed_s


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("photos", help="a folder with a folder of photos for each class")
    parser.add_argument("--epochs", type=int, default=2)
    arguments = parser.parse_args()
    loader = make_loader(arguments.photos)
    step = course.make_step(len(loader.dataset.classes))
    print(step)
    for epoch in range(arguments.epochs):
        images_per_s, waiting = train(loader, step)
        print(f"epoch {epoch}: {images_per_s:,.0f} images/s, {waiting:.0%} of the time waiting for batches")
