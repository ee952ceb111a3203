"""A training as a beginner writes it: photos in folders of classes, PIL, one process. It says how long it waits."""

import argparse
import time

import torch
from torchvision import datasets, transforms

from labkit import course

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def make_loader(photos, batch_size=64):
    steps = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip()]
    steps += [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    dataset = datasets.ImageFolder(photos, transforms.Compose(steps))
    return torch.utils.data.DataLoader(dataset, batch_size, shuffle=True)


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
        step(images, labels).item()  # wait for the device, so that the clock is right
        n_images += len(images)
    elapsed_s = time.perf_counter() - start
    return n_images / elapsed_s, waiting_s / elapsed_s


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("photos", nargs="?", help="a folder with a folder of photos for each class")
    where.add_argument("--data", help="train and val in one folder: prints each rung's accuracy")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each rung, with --data")
    given = parser.parse_args()
    try:
        if given.data:
            for line in course.accuracy_of_rungs(given.data, given.epochs, given.seeds):
                print(line, flush=True)
        else:
            loader = make_loader(given.photos)
            print(step := course.make_step(len(loader.dataset.classes)))
            for epoch in range(given.epochs):
                images_per_s, waiting = train(loader, step)
                print(f"epoch {epoch}: {images_per_s:,.0f} images/s, {waiting:.0%} of the time waiting for batches")
    except (OSError, ValueError) as error:
        parser.error(str(error))
