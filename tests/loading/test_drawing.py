"""A transform that draws nothing is taken as it is, and one that draws from the global generators never is."""

import functools
import math
import random

import albumentations as A
import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import randint as of_torch
from torchvision import transforms as v1
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

import labkit as lk
from tests.image_files import write_pictures

AMOUNT, TABLE = 3, np.arange(255, -1, -1, dtype=np.uint8)
LEVELS = {"dark": 2, "light": [1, 2]}


def helper(image, by=AMOUNT):
    return image // by


def uses_a_helper(image):
    return helper(image) + LEVELS["light"][0]


def converts(image):
    flipped = ImageOps.mirror(Image.fromarray(image.permute(1, 2, 0).numpy()))
    return np.array(flipped)


def blurs(image):
    blurred = cv2.GaussianBlur(np.ascontiguousarray(image.permute(1, 2, 0).numpy()), (3, 3), 1.0)
    return torch.from_numpy(cv2.LUT(blurred, TABLE)).permute(2, 0, 1)


class Fading:
    """Holds a number, a table and another transform."""

    def __init__(self, share: float):
        self.share, self.table, self.then = share, {"end": TABLE}, lambda image: image.flip(1)

    @property
    def factor(self):
        return math.sqrt(self.share)

    def __call__(self, image):
        faded = (image.float() * self.factor).round().clamp(0, 255)
        return self.then(faded.to(torch.uint8))


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.5))
        self.inner = torch.nn.Sequential(torch.nn.Identity())

    def forward(self, image):
        return (self.inner(image.float()) * self.scale).detach().to(torch.uint8)


class OwnFlip(A.HorizontalFlip):
    def apply(self, img, **params):
        return img[:, ::-1] if random.random() < 0.5 else img


class OwnInvert(A.InvertImg):
    def apply(self, img, **params):
        return 255 - np.flip(img, 1)


def changes_at_random(image, **_):
    return image ^ random.randrange(9)


closed_over = 7
FREE = {
    "the one of the report": lambda image: 255 - image,
    "a method of tensors": lambda image: image.flip(-1).permute(0, 1, 2).contiguous(),
    "a closure": (lambda by: lambda image: image // by)(closed_over),
    "a helper": uses_a_helper, "Pillow": converts, "OpenCV": blurs, "a class": Fading(0.5),
    "a partial": functools.partial(helper, by=2), "a module": Module(),
    "NumPy": lambda image: np.ascontiguousarray(np.flip(image.numpy(), 2)),
    "functional": lambda image: functional.adjust_gamma(functional.invert(image), 2.0),
    "torch's functional": lambda image: F.interpolate(image[None].float(), image.shape[1:])[0].to(torch.uint8),
    "among others of v2": v2.Compose([v2.RandomHorizontalFlip(), lambda image: 255 - image, v2.ColorJitter(0.4)]),
    "among others of albumentations": A.Compose([A.HorizontalFlip(), OwnInvert(p=1.0)]),
}  # fmt: skip
BOUND = {
    "torch": lambda image: image + torch.randint(0, 9, (), dtype=torch.uint8),
    "torch, by another name": lambda image: image + of_torch(0, 9, (), dtype=torch.uint8),
    "a method that draws": lambda image: image.clone().random_(0, 9),
    "random": lambda image: image if random.random() < 0.5 else image.flip(-1),
    "random, kept": (lambda draw: lambda image: image + draw())(functools.partial(random.randrange, 9)),
    "NumPy": lambda image: image + int(np.random.randint(9)),
    "dropout": lambda image: F.dropout(image.float(), 0.5).clamp(0, 255).byte(),
    "a layer": torch.nn.Sequential(v2.ToDtype(torch.float32), torch.nn.Dropout()),
    "noise": lambda image: functional.gaussian_noise(image.float() / 255).mul(255).byte(),
    "v2, made within": lambda image: v2.RandomHorizontalFlip()(image),
    "v2, in a closure's list": (lambda all_of: lambda image: all_of[0](image))([np.random.permutation]),
    "an import within": lambda image: image + __import__("random").randrange(9),
    "by text": lambda image: getattr(image.clone(), "rand" + "om_")(0, 9),
    "in a helper": lambda image: draws_in_a_helper(image),
    "in a class": type("Own", (), {"__call__": lambda self, image: image + random.randrange(9)})(),
    "among others of v2": v2.Compose([v2.RandomInvert(), lambda image: image + random.randrange(9)]),
    "v1": v1.RandomInvert(),
    "in a function of albumentations": A.Compose([A.Lambda(image=changes_at_random)]),
    "in a class of albumentations": OwnFlip(),
}


NOT_CALLED = "v2, in a closure's list", "in a function of albumentations", "in a class of albumentations"


def draws_in_a_helper(image):
    return image + random.randrange(9)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("photos"), "a/1.png", "a/2.jpg", "b/3.png", size=(40, 32))


def loader(photos, transform, **options):
    return lk.BatchLoader(photos, batch_size=3, size=(32, 40), train=False, transform=transform, **options)


def global_states():
    keys = np.random.get_state()
    return random.getstate(), keys[1].tobytes(), keys[2], torch.get_rng_state().numpy().tobytes()


@pytest.mark.parametrize("name", FREE)
def test_one_that_draws_nothing_is_taken(photos, name):
    before = global_states()
    [(images, _)] = loader(photos, FREE[name], dtype=torch.uint8)
    assert global_states() == before
    if "among" not in name:
        [(plain, _)] = loader(photos, None, dtype=torch.uint8)
        expected = [torch.as_tensor(FREE[name](image)) for image in plain]
        expected = [image if len(image) == 3 else image.permute(2, 0, 1) for image in expected]
        assert torch.equal(images, torch.stack(expected))


@pytest.mark.parametrize("name", BOUND)
def test_one_that_draws_from_the_global_generators_is_refused(photos, name):
    if name not in NOT_CALLED:
        before = global_states()
        BOUND[name](torch.zeros(3, 8, 8, dtype=torch.uint8))
        assert global_states() != before, "it draws"
    with pytest.raises(ValueError, match="may draw from the global random generators"):
        loader(photos, BOUND[name])


def test_the_line_that_the_message_names_is_enough(photos):
    def unknown(image):
        return getattr(image, "flip")(1)  # noqa: B009 - whose name is no code

    with pytest.raises(ValueError, match=r"set transform\.draws_globally = False"):
        loader(photos, unknown)
    unknown.draws_globally = False
    assert len(list(loader(photos, unknown))) == 1


RNG = np.random.default_rng(0)


def with_a_generator_of_the_module(image):
    return image ^ int(RNG.integers(0, 255))


def test_a_generator_that_the_threads_would_share_is_refused(photos):
    with_a_generator_of_the_module.draws_globally = False
    with pytest.raises(ValueError, match=r"a variable of a module.*make the generator an attribute"):
        loader(photos, with_a_generator_of_the_module)
