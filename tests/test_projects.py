"""The page on loaders for real projects: each block runs, and gives the pixels and labels of plain torch."""

import gc
import os
import re
import tarfile
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torchvision import transforms as v1, tv_tensors
from torchvision.models import ResNet50_Weights
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

import labkit as lk
from labkit.loading.crops import flips, random_crops, uniforms
from labkit.loading.seeding import RandomSources
from tests.pages import TEXTS, blocks

TITLES = re.findall(r"^\*\*([^*]+?)\.?\*\*(?:(?!^\*\*).)*?^```python$", TEXTS["recipes"].read_text(), re.S | re.M)
IMPORTS, *BLOCKS = [block.text for block in blocks(TEXTS["recipes"], "python")]
JOBS = dict(zip(TITLES, BLOCKS, strict=True))

STEPS = v2.Compose([v2.PILToTensor(), v2.Resize(256), v2.CenterCrop(224)])
ONE = 1.001 / 255 / 0.224  # of 255, once normalized
OF_TIMM = v1.Compose([v1.Resize(235, v1.InterpolationMode.BICUBIC), v1.CenterCrop(224), v1.PILToTensor()])
TAGS, SICK = ["indoor", "people", "food"], ["rust", "scab"]
COUNTS = {"cat": 6, "dog": 3, "owl": 3}
KEYS = [f"{name}/{number:02}.jpg" for name, count in COUNTS.items() for number in range(count)]
VAL = [key for key in KEYS if key[:3] != "dog"]
LABELS = {key: list(COUNTS).index(key[:3]) for key in KEYS}
VAL_LABELS = {key: ["cat", "owl"].index(key[:3]) for key in VAL}


class Project:
    """The files that the page names, in the current folder, and what plain torch reads of them, by key."""

    def __init__(self, photo_set):
        # Of none of these is a crop decoded at half its size: crops of 224 pixels are, if they had 448 or more.
        small = [path for path in sorted(photo_set.glob("*/*.jpg")) if min(Image.open(path).size) < 448]
        self.pil, self.mask, self.depth, self.boxes, self.points = {}, {}, {}, {}, {}
        rng = np.random.default_rng(0)
        for key, path in zip(KEYS, small, strict=False):
            holding = ["photos"] + ["val"] * (key in VAL)  # a class folder without a photo is an error
            for folder in (*holding, "masks", "depth"):
                os.makedirs(f"{folder}/{key[:3]}", exist_ok=True)
            for folder in holding:
                os.link(path, f"{folder}/{key}")
            self.pil[key] = Image.open(path).convert("RGB")
            width, height = self.pil[key].size
            mask = rng.integers(0, 9, (height, width), np.uint8)
            depth = rng.integers(0, 65536, (height, width), np.uint16)
            palette = Image.frombytes("P", (width, height), mask.tobytes())
            palette.putpalette(rng.bytes(768))
            palette.save(f"masks/{key[:-3]}png")
            Image.fromarray(depth).save(f"depth/{key[:-3]}png", compress_level=1)
            self.mask[key] = tv_tensors.Mask(torch.from_numpy(mask))
            self.depth[key] = tv_tensors.Image(torch.from_numpy(depth.astype(np.float32))[None])
            corners = rng.integers(0, [width // 2, height // 2], (3, 2))
            self.boxes[key] = np.hstack([corners, corners + rng.integers(20, 120, (3, 2))])
            self.points[key] = tv_tensors.KeyPoints(torch.from_numpy(corners).float(), canvas_size=(height, width))
        self.photos = {key: F.pil_to_tensor(photo) for key, photo in self.pil.items()}
        os.makedirs("scans/lung")
        os.link(f"depth/{key[:-3]}png", "scans/lung/1.png")
        lk.write_shards("photos", "shards", progress=False)
        with tarfile.open("photos.tar", "w") as tar:
            tar.add("photos", ".")
        keys = rng.permutation(KEYS).tolist()  # no table is in the order of the photos
        self.table = pd.DataFrame(rng.integers(0, 2, (len(keys), 3)), pd.Index(keys, name="image"), TAGS)
        self.table["label"], self.table["split"] = rng.choice(SICK, len(keys)), ["train", "val"] * 6
        self.table["age"], self.table["caption"] = range(30, 42), [f"A photo, {key}" for key in keys]
        self.rest = self.table["label"][self.table["split"] == "val"].map(SICK.index).to_dict()
        for file, columns in {"labels": ["label", "split"], "tags": TAGS, "ages": "age", "captions": "caption"}.items():
            self.table[columns].to_csv(f"{file}.csv")
        boxes = [(key, *box, number) for key in keys for number, box in enumerate(self.boxes[key].tolist())]
        pd.DataFrame(boxes, columns=["image", "x1", "y1", "x2", "y2", "label"]).to_csv("boxes.csv", index=False)
        points = [(key, *point) for key in keys for point in self.points[key].tolist()]
        pd.DataFrame(points, columns=["image", "x", "y"]).to_csv("points.csv", index=False)
        images = [{"bytes": open(f"photos/{key}", "rb").read(), "path": key} for key in KEYS]  # noqa: SIM115
        pd.DataFrame({"image": images, "label": list(LABELS.values())}).to_parquet("photos.parquet")


@pytest.fixture(scope="module")
def project(photo_set, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("project"))
        patch.setattr("datasets.config.HF_DATASETS_CACHE", os.path.abspath("cache"))
        yield Project(photo_set)


# What plain torch makes of a job: (image, label or targets, key if asked for) of each sample of a loader's next epoch,
# and how far pixels may be apart.


def label(project, key, cut):
    return LABELS[key]


def training(second=label, size=(224, 224), scale=(0.08, 1), ratio=(3 / 4, 4 / 3), flip=0.5, seed=0):
    """Random crops, cut and mirrored by torchvision, with `second(project, key, cut)`: `cut` does so to a target."""

    def cut(box, is_mirrored, item):
        part = F.resized_crop(item, *box, list(size), antialias=True)
        return F.horizontal_flip(part) if is_mirrored else part

    def plain(project, names, loader):
        keys = list(loader.keys)
        draws = uniforms(seed, loader.epoch, np.arange(len(keys)))
        sizes = np.array([project.photos[key].shape[1:] for key in keys])
        boxes = random_crops(draws, sizes, scale, ratio).tolist()
        cuts = [partial(cut, *drawn) for drawn in zip(boxes, flips(draws, flip), strict=True)]
        return [(cut(project.photos[key]), second(project, key, cut)) for key, cut in zip(keys, cuts, strict=True)], 1

    return plain


def of_table(column, make):
    return lambda project, key, cut: make(project.table.loc[key, column])


def whole(labels=LABELS, steps=STEPS, at_most=0):
    """What steps of torchvision make of whole PIL images, `labels` as a mapping or `labels(project, names)`."""

    def plain(project, names, loader):
        known = labels(project, names) if callable(labels) else labels
        return [(steps(project.pil[key]), known[key]) for key in known], at_most

    return plain


def drawn(photos, recipe, labels=LABELS):
    """What a transform makes of each photo, seeded as labkit's loaders seed it."""
    rows, sources = [], RandomSources(recipe)
    for index, (photo, key) in enumerate(zip(photos, labels, strict=True)):
        sources.seed(0, 0, index)  # of the loader, of the epoch, of the sample
        rows.append((recipe(photo), labels[key]))
    return rows, 0


def pairs(target):
    """Photo and target through the page's transform, seeded as labkit's loaders seed each sample."""

    def plain(project, names, loader):
        rows, sources = [], RandomSources(names["crop"])
        for index, (key, photo) in enumerate(project.photos.items()):
            sources.seed(0, loader.epoch, index)
            rows.append(names["crop"](tv_tensors.Image(photo), target(project, key)))
        return rows, 0

    return plain


def of_albumentations(project, names, loader):
    def recipe(image, recipe=names["recipe"]):
        return torch.from_numpy(recipe(image=np.ascontiguousarray(image.permute(1, 2, 0)))["image"]).permute(2, 0, 1)

    [(cropped, _)] = lk.BatchLoader("photos", size=224, shuffle=False)  # which other jobs compare
    return drawn(cropped, recipe)


def of_weights(project, names, loader):
    labels = torch.cat([labels for _ in range(30) for _, labels in loader])
    assert (abs(labels.bincount() - 120) < 4 * (360 * 1 / 3 * 2 / 3) ** 0.5).all()  # four standard deviations


def of_albumentations_pairs(project, names, loader):
    """Photo and mask through the pipeline, which is the data set's `compose`, seeded as labkit's loaders seed it."""
    rows, sources = [], RandomSources(names["compose"])
    for index, (key, photo) in enumerate(project.photos.items()):
        sources.seed(0, loader.epoch, index)
        pixels = np.ascontiguousarray(photo.permute(1, 2, 0))
        both = names["compose"](image=pixels, mask=project.mask[key].numpy())
        rows.append((both["image"], both["mask"]))
    return rows, 0


def of_albumentations_boxes(project, names, loader):
    rows, sources = [], RandomSources(names["compose"])
    for index, (key, photo) in enumerate(project.photos.items()):
        sources.seed(0, loader.epoch, index)
        pixels, boxes = np.ascontiguousarray(photo.permute(1, 2, 0)), project.boxes[key].astype(np.float32)
        found = names["compose"](image=pixels, bboxes=boxes, labels=np.arange(3))
        corners = torch.as_tensor(found["bboxes"], dtype=torch.float32)
        numbers = torch.as_tensor(found["labels"], dtype=torch.int64)
        rows.append((found["image"], {"boxes": corners, "labels": numbers}))
    return rows, 0


PLAIN = {
    "Masks with Albumentations": of_albumentations_pairs,
    "Boxes with Albumentations": of_albumentations_boxes,
    "Masks with v2": pairs(lambda project, key: project.mask[key]),
    "A folder for each class": {"train": training(), "val": whole({key: LABELS[key] for key in VAL})},
    "A table, with its split": {
        "train": training(of_table("label", SICK.index)),
        "val": whole(lambda project, _: project.rest),
    },
    "Several labels for each image": training(of_table(TAGS, lambda row: torch.tensor(row.tolist()))),
    "Folds": {"train": training(), "val": whole(lambda _, names: {key: LABELS[key] for key in names["val"].keys})},
    "Rare classes as often as common ones": of_weights,
    "Albumentations in threads": of_albumentations,
    "Evaluation as torchvision does it": whole(VAL_LABELS, ResNet50_Weights.IMAGENET1K_V2.transforms(), ONE),
}


def rows_of(loader):
    """(image, label or targets, key if there is one) of each sample of an epoch."""
    for batch in loader:
        yield from batch if isinstance(batch[0], tuple) else zip(*map(split, batch), strict=True)


def split(values):
    if isinstance(values, dict):
        return [dict(zip(values, row, strict=True)) for row in zip(*map(split, values.values()), strict=True)]
    return list(values)


def assert_same(got, expected):
    if isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert_same(got[name], value)
    elif isinstance(expected, torch.Tensor):
        at_most = 1e-3 * expected.is_floating_point()
        torch.testing.assert_close(got, expected.as_subclass(torch.Tensor), rtol=0, atol=at_most)
    else:
        assert got == expected


@pytest.mark.exhaustive
@pytest.mark.parametrize("title", JOBS)
def test_a_block_gives_what_plain_torch_gives(title, project):
    for needed in re.findall(r"^(?:import|from) (timm|sklearn|datasets)", JOBS[title], re.MULTILINE):
        pytest.importorskip(needed)
    names = {"__name__": "__main__"}
    for text in (IMPORTS, JOBS[title]):
        exec(compile(text, title, "exec"), names)  # noqa: S102 - our own text
    plain = PLAIN[title]
    for name, rows in plain.items() if isinstance(plain, dict) else [("loader", plain)]:
        expected, at_most = rows(project, names, names[name]) or ([], 0)
        for image, *others in rows_of(names[name]) if expected else ():
            # The most similar one, since they come in any order.
            some = [one[:, ::16, ::16].float() if one.shape == image.shape else np.inf for one, *_ in expected]
            apart = [abs(one - image[:, ::16, ::16]).sum() for one in some]
            one, *seconds = expected.pop(int(np.argmin(apart)))
            assert (image.float() - one.float()).abs().max() <= at_most
            for pair in zip(others, seconds, strict=True):
                assert_same(*pair)
        assert expected == []
    names.clear()  # a class in a block refers to itself by its methods, and to all names, so to the loader's workers
    gc.collect()
