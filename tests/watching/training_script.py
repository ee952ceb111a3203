"""A training script for `watch`, run as a script: `training_script.py KIND [NUM_WORKERS]`. Prints what it learned."""

import os
import signal
import sys
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

with suppress(ImportError):  # torch imports it at exit, if it is there, and then Python forgets an interrupt: status 1
    import_module("tabulate")


class Photos(Dataset):
    """Naps where storage would be waited for, and computes; `fault` is the index at which something goes wrong."""

    def __init__(self, length: int = 240, fault: str = ""):
        self.length, self.fault = length, fault

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.fault and index == self.length // 2:
            fail(self.fault)
        time.sleep(0.001)
        return torch.full((16,), float(index)) + torch.rand(16)


def fail(how: str) -> None:
    if how == "raises":
        raise KeyError("photo 120")
    if how == "worker dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "interrupted":
        os.kill(os.getpid(), signal.SIGINT)
    if how == "terminated":
        os.kill(os.getpid(), signal.SIGTERM)


def train(kind: str, num_workers: int) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    loader = DataLoader(Photos(fault=kind), 4, shuffle=kind == "", num_workers=num_workers)
    validation = DataLoader(Photos(8), 4)
    for epoch in range(2):
        for number, batch in enumerate(loader):
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.004)
            print(f"{epoch} {number} {loss.item()!r}")
            if number == 30:
                list(validation)
    return model


if __name__ == "__main__":
    name, *options = sys.argv[1:]
    if name == "exits":
        sys.exit(7)
    trained = train("" if name == "trains" else name, int(options[0]))
    if len(options) > 1:
        Path(options[1]).write_bytes(trained.weight.detach().numpy().tobytes())
