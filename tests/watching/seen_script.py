"""A script that tells what it sees of its process, as JSON on stdout: before its imports, and in a training."""

import atexit
import os
import sys

os.environ["OMP_NUM_THREADS"] = "1"  # before its imports, as trainings do: libraries read them as they start
os.environ["MPLBACKEND"] = "svg"
HEAVY = {"torch", "numpy", "matplotlib", "pandas", "rich", "logging", "multiprocessing"}
AT_START = {
    "imported": sorted(HEAVY & sys.modules.keys()),
    "atexit": atexit._ncallbacks(),
    "open files": [number for number in map(int, os.listdir("/proc/self/fd")) if number < 100],
}

import gc  # noqa: E402 - what is imported by now has been noted
import json  # noqa: E402
import locale  # noqa: E402
import logging  # noqa: E402
import random  # noqa: E402
import signal  # noqa: E402
import tempfile  # noqa: E402
import threading  # noqa: E402
import warnings  # noqa: E402


def process():
    """What a script may ask Python of its own process."""
    main = vars(sys.modules["__main__"])
    return {
        "argv": sys.argv,
        "cwd": os.getcwd(),
        "environment": dict(os.environ),
        "executable": [sys.executable, sys.prefix, repr(sys.flags), sys.warnoptions, sys._xoptions],
        "gc": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()],
        "hooks": [getattr(sys, f"{name}hook") is getattr(sys, f"__{name}hook__") for name in ("except", "display")],
        "limits": [sys.getrecursionlimit(), sys.getswitchinterval(), os.nice(0), os.getppid() > 0],
        "locale": locale.setlocale(locale.LC_ALL),
        "logging": [repr(logging.root.handlers), logging.root.level],
        "main": {name: repr(main[name]) for name in ("__file__", "__cached__", "__package__", "__name__", "__doc__")},
        "main's own": sorted(name for name in main if name.startswith("__")),
        "main's types": [type(main[name]).__name__ for name in ("__builtins__", "__loader__", "__spec__")],
        "path": sys.path,
        "signals": [repr(signal.getsignal(each)).partition(" at ")[0] for each in sorted(signal.valid_signals())],
        "streams": [describe(stream) for stream in (sys.stdin, sys.stdout, sys.stderr)],
        "tempdir": tempfile.tempdir,
        "threads": [[thread.name for thread in threading.enumerate()], repr(sys.gettrace()), repr(sys.getprofile())],
        "warnings": list(map(repr, warnings.filters)),
    }


def describe(stream):
    return [stream.name, stream.encoding, stream.errors, stream.line_buffering, getattr(stream, "write_through", None)]


def training():
    """Random numbers, losses and settings of a training with workers, and what is left of it."""
    import matplotlib
    import numpy as np
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    data, model = TensorDataset(torch.randn(80, 4)), torch.nn.Linear(4, 1)
    steps, losses = torch.optim.SGD(model.parameters(), 0.1), []
    loaders = [DataLoader(data, 4, shuffle=True, num_workers=n, persistent_workers=n > 0) for n in (0, 2)]
    for loader in loaders:
        for _ in range(2):
            for (batch,) in loader:
                losses.append(model(batch).square().mean())
                losses[-1].backward()
                steps.step()
    return {
        "backend": matplotlib.get_backend(),
        "draws": [random.random(), np.random.rand(), torch.rand(1).item()],
        "loaders": [sorted(vars(loader)) for loader in loaders],
        "losses": [loss.item() for loss in losses],
        "threads": torch.get_num_threads(),
        "pandas": "pandas" in sys.modules,
    }


if __name__ == "__main__":
    found = {**AT_START, **process()}
    if sys.argv[1:] == ["trains"]:
        found |= {"training": training(), "afterwards": process()}
        del found["afterwards"]["threads"]  # those of workers' queues end some time later
    json.dump(found, sys.stdout)
