"""What must not change while the house is rebuilt: digests of batches, pixels, frames, plans and texts.

    python -m tests.net record FILE      # on the code before
    python -m tests.net compare FILE     # on the code after; names each recorded entry that differs, and ends with 1

Only public names and the command line are used. Digests are of one machine and its libraries.
"""

import contextlib
import hashlib
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from PIL import Image

import labkit as lk

REPO = Path(__file__).resolve().parents[1]
SEEDS = (0, 1, 2)


def digest(value) -> str:
    """SHA-256 of tensors, arrays, bytes, frames and texts, in order, with their shapes and types."""
    found = hashlib.sha256()

    def add(each) -> None:
        if isinstance(each, torch.Tensor):
            each = each.view(torch.int16).numpy() if each.dtype == torch.bfloat16 else each.numpy()
        if isinstance(each, np.ndarray):
            found.update(f"{each.dtype}{each.shape}".encode() + np.ascontiguousarray(each).tobytes())
        elif isinstance(each, bytes):
            found.update(each)
        elif isinstance(each, pd.DataFrame):
            found.update(each.round(9).to_csv(index=False).encode())
        elif isinstance(each, dict):
            add([part for pair in each.items() for part in pair])
        elif isinstance(each, list | tuple):
            for part in each:
                add(part)
        else:
            found.update(repr(each).encode())

    add(value)
    return found.hexdigest()[:20]


def error_of(call, folder: Path) -> str:
    try:
        call()
    except Exception as error:
        return re.sub(r"0x[0-9a-f]+", "0x", f"{type(error).__name__}: {error}".replace(str(folder), "FOLDER"))
    return "no error"


def epochs(loader, n=2):
    found = []
    for epoch in range(n):
        loader.set_epoch(epoch)
        found.append([list(map(torch.clone, batch)) for batch in loader])
    return found


class Noise:
    """A random transform of torch's own."""

    def __call__(self, image):
        crop = int(torch.randint(0, 8, ()))
        return image[:, crop : crop + 96, crop : crop + 96].float() + torch.rand(())


def make_sources(folder: Path):
    photos = folder / "photos"
    for number in range(24):
        pixels = np.random.default_rng(number).integers(0, 256, (8, 10, 3), dtype=np.uint8)
        image = Image.fromarray(pixels).resize((150 + 7 * number, 140 + 3 * number), Image.Resampling.BICUBIC)
        path = photos / "abc"[number % 3] / f"{number:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        exif = Image.Exif()
        if number % 5 == 0:
            exif[274] = 6
        image.convert("L" if number == 7 else "RGB").save(path, quality=90, progressive=number == 3, exif=exif)
    Image.open(photos / "a" / "000.jpg").save(photos / "a" / "png.png")
    subprocess.run(["tar", "-C", folder, "--sort=name", "--mtime=@0", "--owner=0", "--group=0", "--numeric-owner",
                    "-cf", folder / "x.tar", "photos"], check=True)  # fmt: skip
    subprocess.run(["gzip", "-kn", folder / "x.tar"], check=True)
    return photos


def loaders(photos: Path, folder: Path):
    store = lk.FolderStore(photos)
    pixels = lk.PixelStore.build(store, folder / "x.pixels", short_side=128, progress=False)
    yield "PixelStore", [list(pixels.keys), *(pixels[number] for number in range(len(pixels)))]
    mean_std = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    settings = {
        "uint8": {}, "float16": {"dtype": torch.float16, **mean_std}, "antialiased": {"antialias": True},
        "plain": {"antialias": False}, "processes": {"num_processes": 2}, "middle": {"train": False},
    }  # fmt: skip
    for seed in SEEDS:
        for name, options in settings.items():
            for source in ("jpeg", "pixels") if name != "processes" else ("jpeg",):
                used = store if source == "jpeg" else pixels
                loader = lk.BatchLoader(used, size=96, batch_size=5, seed=seed, num_threads=2, **options)
                yield f"BatchLoader {name} {source} {seed}", epochs(loader)
        first = lk.BatchLoader(store, size=96, batch_size=5, seed=seed)
        iterator = iter(first)
        next(iterator), next(iterator)
        state = first.state_dict()
        second = lk.BatchLoader(store, size=96, batch_size=5, seed=seed)
        second.load_state_dict(state)
        yield f"BatchLoader resumed {seed}", [list(map(torch.clone, batch)) for batch in second]
        for name, used, options in (
            ("processes", store, {"num_processes": 2}),
            ("pixels", pixels, {"dtype": torch.float16, **mean_std}),
        ):
            first = lk.BatchLoader(used, size=96, batch_size=5, seed=seed, num_threads=2, **options)
            first.set_epoch(1)
            iterator = iter(first)
            next(iterator)
            second = lk.BatchLoader(used, size=96, batch_size=5, seed=seed, num_threads=2, **options)
            second.load_state_dict(first.state_dict())
            yield f"BatchLoader resumed {name} {seed}", [list(map(torch.clone, batch)) for batch in second]
            del iterator
        dataset = lk.ImageDataset(store, transform=Noise(), decoder="pil")
        for workers in (0, 2):
            config = lk.LoaderConfig(batch_size=5, num_workers=workers, seed=seed)
            loader = lk.make_loader(dataset, config, shuffle=True, collate_fn=list)
            yield f"make_loader {seed}", [[[list(s) for s in b] for b in loader] for _ in range(2)]
            loader = lk.make_loader(dataset, config, shuffle=True, collate_fn=list)
            iterator = iter(loader)
            next(iterator), next(iterator)
            again = lk.make_loader(dataset, config, shuffle=True, collate_fn=list)
            again.load_state_dict(loader.state_dict())
            yield f"make_loader resumed {seed}", [[list(s) for s in b] for b in again]
            del iterator
    shards = folder / "shards"
    lk.write_shards(store, shards, max_count=4, seed=0, engine="threads", progress=False)
    yield "shards", {path.name: path.read_bytes() for path in sorted(shards.glob("*.tar"))}
    for seed in SEEDS:
        for shuffle in (0, 7):
            given = lk.read_shards(str(shards), shuffle=shuffle, seed=seed)
            found = []
            for epoch in range(2):
                given.set_epoch(epoch)
                found.append([list(sample) for sample in given])
            yield f"read_shards {shuffle} {seed}", found
        given = lk.read_shards(str(shards), shuffle=7, seed=seed)
        iterator = iter(given)
        for _ in range(9):
            next(iterator)
        other = lk.read_shards(str(shards), shuffle=7, seed=seed)
        other.load_state_dict(given.state_dict())
        yield f"read_shards resumed {seed}", [list(sample) for sample in other]
        loader = torch.utils.data.DataLoader(lk.read_shards(str(shards), shuffle=7, seed=seed), 3, num_workers=2,
                                             collate_fn=list)  # fmt: skip
        yield f"read_shards workers {seed}", [[list(sample) for sample in batch] for batch in loader]


@contextlib.contextmanager
def as_rank(rank: int, world_size: int):
    """What torchrun tells its processes."""
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in given.items()})
    try:
        yield
    finally:
        for name in given:
            del os.environ[name]


def ranks(photos: Path, folder: Path):
    """Shares of two ranks, also with workers, and resumed; and those of the other loaders."""
    shards, store = folder / "shards", lk.FolderStore(photos)
    options = {"shuffle": 7, "shuffle_initial": 3}
    for seed in SEEDS:
        for rank in range(2):
            with as_rank(rank, 2):
                given = lk.read_shards(str(shards), seed=seed, **options)
                given.set_epoch(1)
                yield f"read_shards rank {rank} {seed}", [list(sample) for sample in given]
                dataset = lk.read_shards(str(shards), seed=seed, **options)
                dataset.set_epoch(1)
                loader = torch.utils.data.DataLoader(dataset, 3, num_workers=2, collate_fn=list)
                yield f"read_shards rank {rank} workers {seed}", [list(map(list, batch)) for batch in loader]
                loader = lk.BatchLoader(store, size=96, batch_size=5, seed=seed)
                yield f"BatchLoader rank {rank} {seed}", epochs(loader)
                config = lk.LoaderConfig(batch_size=5, num_workers=0, seed=seed)
                loader = lk.make_loader(lk.ImageDataset(store, decoder="pil"), config, shuffle=True, collate_fn=list)
                yield f"make_loader rank {rank} {seed}", [[list(map(list, b)) for b in loader] for _ in range(2)]
    for seed in SEEDS:
        for rank in range(2):
            with as_rank(rank, 2):
                given = lk.read_shards(str(shards), seed=seed, **options)
                given.set_epoch(1)
                iterator = iter(given)
                for _ in range(4):
                    next(iterator)
                again = lk.read_shards(str(shards), seed=seed, **options)
                again.load_state_dict(given.state_dict())
                yield f"read_shards rank {rank} resumed {seed}", [list(sample) for sample in again]


def depth_and_device(photos: Path, folder: Path):
    pairs = folder / "pairs"
    pairs.mkdir()
    for number in range(2):
        rng = np.random.default_rng(number)
        for name, pixels in {
            "rgb": rng.integers(0, 256, (96, 128, 3), dtype=np.uint8),
            "depth": rng.integers(0, 40_000, (96, 128), dtype=np.uint16),
        }.items():
            Image.fromarray(pixels).save(pairs / f"{name}_{number}.png")
    names = folder / "pairs.txt"
    names.write_text("".join(f"rgb_{number}.png depth_{number}.png\n" for number in range(2)))
    for options in ({"mode": "train"}, {"mode": "train", "fast": True}, {"mode": "evaluate"}, {"preset": "kitti"}):
        random.seed(0)
        dataset = lk.DepthPairs(lk.FolderStore(pairs), names, **options)
        if options.get("preset") == "kitti":  # whose crop is larger
            yield f"DepthPairs {options}", error_of(lambda dataset=dataset: dataset[0], folder)
        else:
            yield f"DepthPairs {options}", [dataset[number] for number in range(len(dataset))]
    images, targets = torch.rand(6, 3, 32, 40, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3
    for seed in SEEDS:
        for mix in (lk.mixup, lk.cutmix):
            for per_sample in (False, True):
                torch.manual_seed(seed)
                mixed = mix(images, targets, num_classes=3, alpha=0.7, per_sample=per_sample)
                yield f"{mix.__name__} {per_sample} {seed}", list(mixed)
    loader = lk.BatchLoader(lk.FolderStore(photos), size=96, batch_size=5)
    yield "CUDAPrefetcher cpu", [list(map(torch.clone, batch)) for batch in lk.CUDAPrefetcher(loader, "cpu")]
    loader.set_epoch(0)
    with lk.simulated_cuda():
        moved = [[part.cpu() for part in batch] for batch in lk.CUDAPrefetcher(loader, "cuda", depth=2)]
    yield "CUDAPrefetcher simulated", moved
    (folder / "broken").mkdir()
    for number, path in enumerate(sorted(photos.rglob("*.jpg"))[:4]):
        (folder / "broken" / f"{number}.jpg").write_bytes(path.read_bytes()[: 900 if number == 2 else None])
    dataset = lk.ImageDataset(lk.FolderStore(folder / "broken"), decoder="pil", on_error="skip", classes=[])
    yield "skipped", [lk.collate([dataset[2], dataset[2 - 1]]), [tuple(skipped) for skipped in dataset.skipped]]


def stores(photos: Path, folder: Path):
    for name, store in {
        "folder": lk.FolderStore(photos), "tar": lk.TarStore(folder / "x.tar"),
        "opened": lk.open_store(str(folder / "x.tar")),
    }.items():  # fmt: skip
        yield f"store {name}", [(key, store.read(key)) for key in store.keys()]  # noqa: SIM118
    made = lk.make_photos(folder / "made", 6, seed=3, progress=False)
    yield "make_photos", {str(path.relative_to(made)): path.read_bytes() for path in sorted(made.rglob("*.jpg"))}
    dataset = lk.ImageDataset(lk.FolderStore(photos), decoder="pil")
    yield "labels", [list(dataset.keys), dataset.classes, dataset.labels, dataset[4][0]]
    for decoder in lk.DECODERS:
        pixels = []
        for path in sorted(photos.rglob("*.*")):
            pixels.append(lk.decode(path.read_bytes(), decoder))
        yield f"decode {decoder}", pixels
        scaled = [lk.decode(path.read_bytes(), decoder, short_side=60) for path in sorted(photos.rglob("*.*"))]
        yield f"decode {decoder} scaled", scaled
    sizes = lk.collect_sizes(photos)
    yield "sizes", sizes.assign(path=[str(path).replace(str(folder), "FOLDER") for path in sizes["path"]])
    for seed in SEEDS:
        sampler = lk.BucketBatchSampler(sizes, 4, seed=seed)
        yield f"buckets {seed}", [[list(batch) for batch in sampler] for _ in range(2)]
    for number, name in enumerate(("x.tar", "x.tar.gz")):
        lk.extract_tars([folder / name], folder / "extracted" / str(number), progress=False)
    extracted = folder / "extracted"
    yield "extracted", {str(p.relative_to(extracted)): p.read_bytes() for p in sorted(extracted.rglob("*.jpg"))}


def tables(folder: Path):
    warnings.simplefilter("ignore")
    for name in ("00_start", "11_ladder", "13_peers"):
        frame = lk.load_frame(REPO / "notebooks" / f"{name}.csv")
        for (machine, experiment), runs in frame.groupby(["env_id", "experiment"], observed=True, sort=False):
            try:
                yield f"summarize {name} {machine} {experiment}", lk.summarize(runs)
                yield f"conclude {name} {machine} {experiment}", lk.conclude(runs)
                yield f"epoch_time {name} {machine} {experiment}", lk.epoch_time(runs, 1000).reset_index()
            except ValueError as error:
                yield f"summarize {name} {machine} {experiment}", str(error)
    for number, given in enumerate([
        {"demand": 7150, "n_gpus": 8, "cores_per_node": 96, "cpu_ms_per_image": 0.9},
        {"gpu": "h100", "n_gpus": 16, "n_nodes": 2, "cpu_ms_per_image": (0.8, 1.2), "storage": "s3"},
        {"gpu": "a100", "n_gpus": 8, "cpu_ms_per_image": 2, "storage": "s3", "shard_mb": 500},
        {"gpu": "rtx 3090", "model": "ResNet-18", "cores_per_node": 4, "cpu_ms_per_image": 1.5, "storage": "memory"},
        {"demand": (300, 500), "n_gpus": 4, "vcpus_per_node": 32, "cpu_ms_per_image": 9, "gil_us_per_image": 80},
    ]):  # fmt: skip
        yield f"plan {number}", json.dumps(lk.plan(**given).to_dict(), sort_keys=True)
    frame = lk.compare({"a": lambda: iter([torch.zeros(4)] * 4)}, baseline="a", rounds=2, budget_s=0, progress=False)
    yield "compare columns", list(frame.columns)


def errors(photos: Path, folder: Path):
    store = lk.FolderStore(photos)
    whole = (folder / "x.tar").read_bytes()
    (folder / "cut.tar").write_bytes(whole[: len(whole) // 2])
    (folder / "cut.jpg").write_bytes((photos / "a" / "000.jpg").read_bytes()[:900])
    empty = folder / "empty"
    empty.mkdir()
    config = lk.LoaderConfig(batch_size=5, num_workers=0)
    calls = {
        "cut tar": lambda: lk.TarStore(folder / "cut.tar").keys(),
        "cut tar extracted": lambda: lk.extract_tars([folder / "cut.tar"], folder / "no", progress=False),
        "cut shard": lambda: list(lk.read_shards([str(folder / "cut.tar")])),
        "cut jpeg": lambda: lk.decode((folder / "cut.jpg").read_bytes(), "pil", key="cut.jpg"),
        "no image": lambda: lk.decode(b"nothing", "cv2", key="x"),
        "compressed": lambda: lk.TarStore(folder / "x.tar.gz").keys(),
        "missing key": lambda: store.read("a/no.jpg"),
        "missing folder": lambda: lk.FolderStore(folder / "no").keys(),
        "decoder": lambda: lk.decode(b"", "jpeg9000"),
        "batch size": lambda: lk.BatchLoader(store, batch_size=0),
        "config": lambda: lk.LoaderConfig(num_workers=-1),
        "compare": lambda: lk.compare({}, baseline="a"),
        "plan": lambda: lk.plan(),
        "write shards again": lambda: lk.write_shards(store, folder / "shards", max_count=5, progress=False),
        "pixels": lambda: lk.PixelStore(folder / "x.tar"),
        "sizes": lambda: lk.collect_sizes(folder / "no"),
        "shards": lambda: list(lk.read_shards(str(folder / "no"))),
        "scheme": lambda: lk.open_store("ftp://x/y"),
        "tar mode": lambda: lk.TarStore(folder / "x.tar", mode="sequential"),
        "missing tar": lambda: lk.TarStore(folder / "no.tar"),
        "missing member": lambda: lk.TarStore(folder / "x.tar").read("photos/a/no.jpg"),
        "empty folder": lambda: lk.FolderStore(empty).keys(),
        "classes": lambda: lk.ImageDataset(store, classes=["a"]),
        "dataset decoder": lambda: lk.ImageDataset(store, decoder="jpeg9000"),
        "on_error": lambda: lk.ImageDataset(store, on_error="ignore"),
        "size": lambda: lk.BatchLoader(store, size=0),
        "threads": lambda: lk.BatchLoader(store, num_threads=0),
        "dtype": lambda: lk.BatchLoader(store, dtype=torch.int32),
        "mean alone": lambda: lk.BatchLoader(store, dtype=torch.float16, mean=(0.5, 0.5, 0.5)),
        "uint8 with mean": lambda: lk.BatchLoader(store, mean=(0.5,) * 3, std=(0.2,) * 3),
        "another seed": lambda: lk.BatchLoader(store, seed=1).load_state_dict(lk.BatchLoader(store).state_dict()),
        "no state": lambda: lk.BatchLoader(store).load_state_dict({"epoch": 1}),
        "make_loader state": lambda: lk.make_loader(lk.ImageDataset(store), config).load_state_dict({"epoch": 1}),
        "make_loader option": lambda: lk.make_loader(lk.ImageDataset(store), config, shufle=True),
        "prefetch_factor": lambda: lk.LoaderConfig(prefetch_factor=0),
        "start_method": lambda: lk.LoaderConfig(start_method="thread"),
        "shards shuffle": lambda: lk.read_shards(str(folder / "shards"), shuffle=-1),
        "shards decoder": lambda: lk.read_shards(str(folder / "shards"), decoder="jpeg9000"),
        "shards pipe": lambda: lk.read_shards("pipe:cat x.tar"),
        "shards state": lambda: lk.read_shards(str(folder / "shards")).load_state_dict({"epoch": 1}),
        "write_shards count": lambda: lk.write_shards(store, folder / "none", max_count=0, progress=False),
        "pixels short_side": lambda: lk.PixelStore.build(store, folder / "no.pixels", short_side=0, progress=False),
        "buckets batch_size": lambda: lk.BucketBatchSampler(lk.collect_sizes(photos), 0),
        "buckets frame": lambda: lk.BucketBatchSampler(pd.DataFrame({"path": ["a"]}), 4),
        "depth list": lambda: lk.DepthPairs(store, folder / "no.txt"),
        "depth preset": lambda: lk.DepthPairs(store, folder / "pairs.txt", preset="kity"),
        "mixup dtype": lambda: lk.mixup(torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(2)),
        "mixup classes": lambda: lk.mixup(torch.zeros(2, 3, 4, 4), torch.tensor([0, 1])),
        "cutmix label": lambda: lk.cutmix(torch.zeros(2, 3, 4, 4), torch.tensor([0, 9]), num_classes=3),
        "prefetcher device": lambda: lk.CUDAPrefetcher([], "cuda"),
        "prefetcher depth": lambda: lk.CUDAPrefetcher([], "cpu", depth=-1),
        "photos profile": lambda: lk.make_photos(folder / "none", 1, profile="cats", progress=False),
        "compare baseline": lambda: lk.compare({"a": list}, baseline="b"),
        "compare option": lambda: lk.compare({"a": list}, baseline="a", round=2),
        "compare empty": lambda: lk.compare({"a": list}, baseline="a", rounds=1, budget_s=0, progress=False),
        "summarize columns": lambda: lk.summarize(pd.DataFrame({"variant": ["a"]})),
        "load_frame": lambda: lk.load_frame(folder / "no.csv"),
        "epoch_time": lambda: lk.epoch_time(lk.load_frame(REPO / "notebooks" / "11_ladder.csv"), 0),
        "plan gpu": lambda: lk.plan(gpu="h1000", cpu_ms_per_image=1),
        "plan storage": lambda: lk.plan(demand=100, cpu_ms_per_image=1, storage="floppy"),
        "extract twice": lambda: lk.extract_tars([folder / "no.tar"], folder / "none", progress=False),
    }
    for name, call in calls.items():
        yield f"error {name}", error_of(call, folder)


SCRIPT = """
import signal, sys, torch
from torch.utils.data import DataLoader, TensorDataset
for batch in DataLoader(TensorDataset(torch.zeros(64, 2)), 4):
    batch[0].sum()
END
"""
ENDS = {"0": "", "3": "sys.exit(3)", "error": "1 / 0", "SIGTERM": "signal.raise_signal(signal.SIGTERM)"}


def keys_of(value):
    if isinstance(value, dict):
        return {name: keys_of(each) for name, each in sorted(value.items())}
    return [keys_of(value[0])] if isinstance(value, list) and value else type(value).__name__


def watched(folder: Path):
    for name, end in ENDS.items():
        script, report = folder / "train.py", folder / f"{name}.json"
        script.write_text(SCRIPT.replace("END", end))
        ran = subprocess.run([sys.executable, "-m", "labkit", "watch", "--json", str(report), str(script)],
                             capture_output=True, text=True, cwd=folder)  # fmt: skip
        found = keys_of(json.loads(report.read_text())) if report.exists() else "no report"
        yield f"watch {name}", [ran.returncode, found, re.findall(r"^\w+Error.*", ran.stderr, re.MULTILINE)]


def main() -> int:
    what, path = sys.argv[1:]
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["LABKIT_HOME"] = str(folder / "home")
        photos = make_sources(folder)
        parts = [make(photos, folder) for make in (loaders, ranks, stores, depth_and_device, errors)]
        for part in (*parts, tables(folder), watched(folder)):
            for entry, value in part:
                text = digest(value)
                if found.setdefault(entry, text) != text:
                    print(f"{entry}: not the same twice")
                found[entry] = text
                if entry.startswith(("error", "watch", "compare")):
                    found[entry] = json.dumps(value)
    if what == "record":
        Path(path).write_text(json.dumps(found, indent=1))
        print(f"{len(found)} entries")
        return 0
    before = json.loads(Path(path).read_text())
    wrong = [entry for entry in before if before[entry] != found.get(entry)]
    for entry in wrong:
        print(f"{entry}:\n  before {before.get(entry)}\n  after  {found.get(entry)}")
    n_new = len(found.keys() - before.keys())
    print(f"{len(before) - len(wrong)} of {len(before)} entries are the same, {n_new} were not recorded")
    return bool(wrong)


if __name__ == "__main__":
    with contextlib.redirect_stderr(io.StringIO()) if "-q" in sys.argv else contextlib.nullcontext():
        sys.exit(main())
