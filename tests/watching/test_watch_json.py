"""The page on `watch --json` has every key that real runs write, with its type, and no other."""

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import Compose, PILToTensor, Resize

import labkit as lk
from labkit.app.cli import main
from labkit.errors import ArgumentError
from labkit.watching import linux
from labkit.watching.diff import compare_runs
from labkit.watching.program import OVER_BUDGET
from labkit.watching.ranks import combine_ranks
from labkit.watching.replay import Replay
from labkit.watching.report import SHARES
from tests.pages import TEXTS
from tests.paths import REPO, invoke

TYPES = {"null": type(None), "boolean": bool, "string": str, "array": list, "object": dict}


def written_out(key):
    """`a.{b,c}` as `a.b` and `a.c`."""
    start, _, rest = key.partition("{")
    names, _, end = rest.partition("}")
    return [f"{start}{name}{end}" for name in names.split(",")]


def rows():
    """The types of each key of the page; `<cause>` and `{one,another}` are written out."""
    found = {}
    for keys, types in re.findall(
        r"^\| (`.*?`) \| (.*?) \|", TEXTS["reference"].read_text().partition("## Guarantees")[0], re.M
    ):
        names = [name for each in re.findall(r"`(.*?)`", keys) for name in written_out(each)]
        kinds = types.split(", ") if types == "string, integer" else [types] * len(names)
        for name, kind in zip(names, kinds, strict=True):
            for each in [name.replace("<cause>", cause) for cause in SHARES] if "<cause>" in name else [name]:
                assert each not in found
                found[each] = set(re.split(r", or |, | or ", kind))
    return found


def values(value, path=""):
    """Every value in it with its path, such as `lines[].part`."""
    yield path, value
    for name, each in value.items() if isinstance(value, dict) else ():
        yield from values(each, f"{path}.{name}".lstrip("."))
    for each in value if isinstance(value, list) else ():
        yield from values(each, f"{path}[]")


def is_of(kind, value):
    if kind in ("number", "integer"):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and (kind == "number" or value == int(value))
    return kind == "any" or (kind in TYPES and isinstance(value, TYPES[kind]))


def row_of(path, page):
    """The page's key of a path: itself, or one whose names in angle brackets stand for it; None: there is none."""
    if path in page:
        return path
    patterns = {key: re.sub(r"<\w+>", "[^.]+", re.escape(key)) for key in page if "<" in key}
    return next((key for key, pattern in patterns.items() if re.fullmatch(pattern, path)), None)


def train(loader, epochs=2, device="cpu"):
    model = torch.nn.Linear(64, 1, device=device)
    steps = torch.optim.SGD(model.parameters(), 1e-6)
    for _ in range(epochs):
        for images, _ in loader:
            model(images[:, 0, 0, :64].to(device).float()).mean().backward()
            steps.step()


@pytest.fixture(scope="module")
def photos(photo_set):
    return ImageFolder(photo_set, Compose([Resize((64, 64)), PILToTensor()]))


def watched(train_here):
    with lk.watch() as seen:
        train_here()
    return seen.report()


def replayed(photos):
    class Ended(Exception):
        pass

    def end():
        raise Ended

    with lk.watch() as seen, suppress(Ended):
        seen.record.control = Replay(seen.record, 10, end)
        train(DataLoader(torch.utils.data.ConcatDataset([photos] * 4), 1))
    return seen.report()


def in_ranks(report, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("labkit.watching.ranks.children", lambda parent: [parent])  # the other rank runs
    ranks = [{"RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"} for rank in "01"]
    assert combine_ranks(report, ranks[1]) is None
    return combine_ranks(report, ranks[0])


SCRIPT = """
import multiprocessing as mp, sys, time, torch
from torch.utils.data import DataLoader, TensorDataset

def collate(samples):
    time.sleep(1.3 * (samples[0][0] == 40.0).item())
    return torch.stack([sample for sample, in samples])

def train():
    model = torch.nn.Linear(1, 1)
    steps = torch.optim.SGD(model.parameters(), 1e-6)
    for batch in DataLoader(TensorDataset(torch.arange(60.0)[:, None]), 1, collate_fn=collate):
        model(batch).mean().backward()
        steps.step()

if len(sys.argv) > 1:
    processes = [mp.get_context("fork").Process(target=train) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
else:
    train()
"""


def of_a_script(folder, *arguments):
    """What the command writes of a script that hangs for a while, with a budget, also in processes that it starts."""
    (folder / "train.py").write_text(SCRIPT)
    options = ["--json", "found.json", "--stall", "0.5", "--budget", "waiting=99%"]
    command = [sys.executable, "-m", "labkit", "watch", *options, "train.py", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, OVER_BUDGET), done.stderr
    return json.loads((folder / "found.json").read_text())


@pytest.mark.exhaustive
def test_the_page_has_every_key_of_real_runs_with_its_type_and_no_other(photos, tmp_path, monkeypatch):
    single = watched(lambda: train(DataLoader(photos, 2)))
    reports = [
        single, watched(lambda: train(DataLoader(photos, 2, num_workers=2, persistent_workers=True))),
        watched(lambda: train(lk.BatchLoader(lk.FolderStore(photos.root), size=64, batch_size=2))),
        watched(lambda: train(DataLoader(photos, 8), epochs=1)),  # too few batches for an interval
        replayed(photos), in_ranks(single, tmp_path, monkeypatch),
    ]  # fmt: skip
    with lk.simulated_cuda():
        torch.zeros(1, device="cuda")
        reports.append(watched(lambda: train(DataLoader(photos, 2, pin_memory=True), device="cuda")))
    runs = [json.loads(json.dumps(report.to_dict(), allow_nan=False)) for report in reports]
    runs += [of_a_script(tmp_path), of_a_script(tmp_path, "starts processes")]
    assert any(note.startswith("It hung: ") for note in runs[-1]["notes"] + runs[-2]["notes"])

    page, seen = rows(), {}
    for run in runs:
        assert next(iter(run)) == "schema_version"
        for path, value in values(run):
            key = row_of(path, page)
            if key is None:
                assert isinstance(value, dict | list), f"{path} is not on the page"
            else:
                seen.setdefault(key, []).append(value)
                assert any(is_of(kind, value) for kind in page[key]), f"{path} is {value!r}, not {page[key]}"
            for name in [name for name in page if isinstance(value, dict) and name.rpartition(".")[0] == path]:
                is_there = name.rpartition(".")[2].removesuffix("[]") in value
                assert is_there or "absent" in page[name] or "<" in name, f"{name} is missing"
    unseen = {"resources.pressure.<resource>"} - (set() if not linux.pressures() else {"resources.pressure.<resource>"})
    assert page.keys() - seen.keys() == unseen
    unknown = {key for key, each in seen.items() if all(value is None for value in each)}
    of_workers = {
        f"resources.memory.worker_{name}_bytes" for name in ("growth", "private", "shared")
    }  # that end at once
    known = {"gpu_utilization", "cpu_share", "resources.step_queued", "resources.making_queued"}
    assert unknown <= known | of_workers


def test_a_later_version_is_refused_and_one_before_versions_is_read(tmp_path):
    report = {
        "shares": dict.fromkeys(SHARES, 0.0) | {"compute": 1.0}, "blocks_s": {name: [0.1] for name in SHARES},
        "settings": {}, "machine": {}, "others_share": 0.0, "ceiling_is_bound": True,
        "costs_s": {"step": 0.1, "waiting": 0.0},
    }  # fmt: skip
    path = tmp_path / "watch.json"

    def uses():
        yield partial(compare_runs, path, path)
        yield partial(lk.plan, path, batch_size=2, cores_per_node=4, cpu_ms_per_image=1)

    for version in ({}, {"schema_version": 1}):
        path.write_text(json.dumps(version | report))
        assert all(use() for use in uses())
    path.write_text(json.dumps({"schema_version": 2} | report))
    for use in uses():
        with pytest.raises(ArgumentError, match="schema_version 2, and this labkit reads 1 and earlier ones: upgrade"):
            use()
    done = invoke(main, ["diff", str(path), str(path)])
    assert (done.exit_code, done.output.count("\n")) == (2, 1)
