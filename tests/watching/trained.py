"""A small training, and a script under `labkit watch`."""

import os
import subprocess
import sys

import torch

import labkit as lk
from tests.paths import REPO

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPO)}


def optimizer():
    model = torch.nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), 1e-6)


def train(batches, then=lambda batch: None):
    """A step on each batch, and what else it does."""
    model, steps = optimizer()
    for batch in batches:
        x = batch[0] if isinstance(batch, list | tuple) else batch
        steps.zero_grad()
        is_usual = isinstance(x, torch.Tensor) and x.dim() > 1
        model(x.flatten(1)[:, :4].float() if is_usual else torch.zeros(1, 4)).mean().backward()
        steps.step()
        then(batch)


def watched_while(batches, then=lambda batch: None):
    """What `watch` sees of such a training."""
    with lk.watch() as watched:
        train(batches, then)
    return watched


def watch_script(*words, **options):
    """A process of `labkit watch WORDS`, when it has ended."""
    options = {"capture_output": True, "text": True, "timeout": 250, "env": ENVIRONMENT, "check": False, **options}
    return subprocess.run([sys.executable, "-m", "labkit", "watch", *map(str, words)], **options)
