"""A transform of one's own: the pixels that it gives when called directly, for any number of threads and processes."""

import importlib
import inspect
import itertools
import pickle
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import albumentations as A
import cloudpickle
import numpy as np
import pytest
import torch
from torchvision import transforms as v1, tv_tensors
from torchvision.transforms import v2

import labkit as lk
from labkit.loading.own_transform import OwnTransform
from labkit.loading.seeding import RandomSources, derived_seed

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spawned workers cannot import a test file

IMAGE = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)
SEEDS = list(itertools.product((0, 1), range(6), (0, 2)))  # epoch, index, occurrence


def tensor_of(image: np.ndarray = IMAGE) -> torch.Tensor:
    return torch.from_numpy(image.transpose(2, 0, 1).copy())


def numbers_of(epoch: int, index: int, occurrence: int) -> tuple[int, ...]:
    return (5, epoch, index, -2, occurrence) if occurrence else (5, epoch, index)


def applied(own: OwnTransform, seeds=SEEDS, n_threads: int = 1) -> list[bytes]:
    """Of each seed, whichever thread makes it."""
    with ThreadPoolExecutor(n_threads) as pool:
        return list(pool.map(lambda each: own.apply(IMAGE.copy(), *each).tobytes(), seeds))


def global_states() -> tuple:
    return random.getstate(), pickle.dumps(np.random.get_state()), torch.get_rng_state().numpy().tobytes()


class HoldsGenerators:
    draws_globally = False

    def __init__(self):
        self.numpy, self.python, self.torch = np.random.default_rng(), random.Random(), torch.Generator()

    def __call__(self, image):
        added = torch.randint(0, 9, image.shape, generator=self.torch) + self.python.randrange(99)
        return (added + torch.from_numpy(self.numpy.integers(0, 99, image.shape))).to(torch.uint8)


def compose(*more) -> A.Compose:
    transforms = [
        A.HorizontalFlip(), A.VerticalFlip(), A.ColorJitter(p=1), A.GaussNoise(p=1), A.OneOf([A.Blur(), A.Sharpen()]),
    ]  # fmt: skip
    return A.Compose([*transforms, *more])


OWN = {
    "albumentations": compose(),
    "v2": v2.Compose([v2.RandomHorizontalFlip(), v2.ColorJitter(0.4, 0.4, 0.4, 0.1), v2.RandomErasing(value="random")]),
    "generators of its own": HoldsGenerators(),
}


MODULE = """
import threading
barrier = threading.Barrier(2)

def meet(image):
    barrier.wait(60)
    return image

KEPT = []

def keep(image):
    KEPT.append(image)
    return image

meet.draws_globally = False
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Functions that are copied by their name: all threads use the same variables."""
    (tmp_path / "of_a_project.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("of_a_project")
    del sys.modules["of_a_project"]


@pytest.fixture(params=OWN)
def own(request) -> OwnTransform:
    return OwnTransform(OWN[request.param], seed=5)


class TestDraws:
    def test_depend_on_the_image_alone(self, own):
        """Of several threads, in any order, and of a copy in another place; each image has others."""
        first = applied(own)
        shuffled = random.Random(1).sample(SEEDS, len(SEEDS))
        assert applied(own, shuffled * 4, n_threads=6) == [first[SEEDS.index(each)] for each in shuffled] * 4
        assert applied(pickle.loads(pickle.dumps(own)), n_threads=2) == first
        assert len(set(first)) == len(SEEDS)

    def test_leave_the_global_generators(self, own):
        """Of the next normal draw, NumPy keeps the second half."""
        np.random.normal()
        before = global_states()
        applied(own, n_threads=4)
        assert global_states() == before

    def test_are_those_of_albumentations_called_directly(self):
        own, direct = OwnTransform(compose(), seed=5), compose()
        sources = RandomSources(direct)
        for each in SEEDS:
            sources.seed(*numbers_of(*each))
            assert np.array_equal(own.apply(IMAGE, *each), direct(image=IMAGE)["image"])


def made(kind: type, *choices: tuple):
    """An object of a class, with the first arguments of these that it takes; None if it takes none of them."""
    for arguments in choices:
        try:
            return kind(*arguments)
        except Exception:  # noqa: S112 - each library has errors of its own for wrong arguments
            continue
    return None


def classes_of(module, parent: type) -> dict[str, type]:
    return {name: kind for name, kind in vars(module).items() if inspect.isclass(kind) and issubclass(kind, parent)}


@pytest.mark.filterwarnings("ignore")
class TestOfALibrary:
    """What runs without a lock: no transform of these draws from a generator that another thread may use."""

    def test_every_transform_of_albumentations_draws_from_its_own_generators(self):
        names = []
        for name, kind in classes_of(A, A.BasicTransform).items():
            transform = made(kind, ())
            own = OwnTransform(transform, seed=5) if transform and not isinstance(transform, A.Lambda) else None
            if own is None or own.drawn_by or own.shares_generator:
                continue
            before = global_states()
            try:
                images = [own.apply(IMAGE.copy(), 0, 3) for _ in range(2)]
            except Exception:
                images = []
            assert global_states() == before, name
            if images:
                assert np.array_equal(*images), name
                names.append(name)
        assert len(names) > 60

    def test_every_transform_of_v2_draws_as_after_manual_seed(self):
        names = []
        choices = (), (0.5,), (3,), ((0.5, 1.0),), (10, 20), (1.0, 0.5)
        for name, kind in classes_of(v2, torch.nn.Module).items():
            transform = made(kind, *choices)
            own = OwnTransform(transform, seed=5) if transform else None
            if own is None or own.drawn_by or own.shares_generator:
                continue
            if hasattr(transform, "p"):
                transform.p = 1.0
            own = OwnTransform(transform, seed=5)
            before = global_states()
            for index in range(3):
                torch.manual_seed(derived_seed(5, 0, index) & (1 << 63) - 1)
                try:
                    expected = transform(tensor_of())
                    is_image = expected.shape == (3, *IMAGE.shape[:2]) and expected.dtype == torch.uint8
                except Exception:
                    is_image = False
                before = global_states()
                if is_image:
                    assert np.array_equal(own.apply(IMAGE, 0, index), expected.permute(1, 2, 0)), name
                    names.append(name)
                else:
                    with pytest.raises((ValueError, TypeError, LookupError, RuntimeError, AttributeError)):
                        own.apply(IMAGE, 0, index)
                assert global_states() == before, name
        assert len(set(names)) > 25


def test_threads_call_at_once_what_is_declared(module):
    """Without both in it at a time, the barrier breaks."""
    assert applied(OwnTransform(module.meet), SEEDS[:2], n_threads=2) == [IMAGE.tobytes()] * 2


def flip_in_place(image, **_):
    image[:] = image[:, ::-1].copy()
    return image


GIVES = {
    "planes": lambda image: image.flip(-1),
    "a tv_tensor": lambda image: tv_tensors.Image(image.flip(-1)),
    "an array of planes": lambda image: image.numpy()[:, :, ::-1],
    "an array, channels last": lambda image: image.permute(1, 2, 0).numpy()[:, ::-1],
    "a tensor, channels last": lambda image: image.permute(1, 2, 0).flip(1),
    "what it was given, written into": lambda image: image.copy_(image.flip(-1)),
    "an array written into": A.Lambda(image=flip_in_place),
    "an Albumentations array": A.HorizontalFlip(p=1),
    "an Albumentations tensor": A.Compose([A.HorizontalFlip(p=1), A.ToTensorV2()]),
}


SHAPES = (24, 32, 3), (3, 3, 3), (1, 1, 3), (3, 8, 3)


@pytest.mark.parametrize(("kind", "shape"), [
    (kind, shape) for kind in GIVES for shape in SHAPES
    if shape != (3, 3, 3) or "channels last" not in kind  # which of those axes has the channels, nobody can tell
])  # fmt: skip
def test_a_transform_may_give(kind, shape):
    image = IMAGE[: shape[0], : shape[1]].copy()
    given = image.copy()
    result = OwnTransform(GIVES[kind]).apply(image, 0, 0)
    assert np.array_equal(result, given[:, ::-1])
    assert result.flags.c_contiguous
    assert np.array_equal(image, given)


def test_a_tensor_that_is_kept_stays_as_it_is(module):
    own = OwnTransform(module.keep)
    images = [IMAGE, IMAGE[::-1].copy(), IMAGE[:8, :8].copy()]
    for image in images:
        own.apply(image, 0, 0)
    assert all(map(np.array_equal, module.KEPT, [image.transpose(2, 0, 1) for image in images]))


def test_one_color_for_all_channels_may_be_one_plane():
    gray = OwnTransform(lambda image: image[:1].expand(3, -1, -1)).apply(IMAGE, 0, 0)
    assert np.array_equal(gray, IMAGE[:, :, :1].repeat(3, 2))


LEAVE_FLOATS, LEAVE_SIZES = "BatchLoader has dtype=, mean= and std=", "leave out RandomResizedCrop, Resize"
WRONG = {
    "floats": (lambda image: image / 255, ValueError, LEAVE_FLOATS),
    "normalized": (A.Normalize(), ValueError, LEAVE_FLOATS),
    "a crop": (v2.RandomCrop(8), ValueError, LEAVE_SIZES),
    "gray": (lambda image: image[:1], ValueError, "three channels"),
    "nothing": (lambda image: None, TypeError, "an object of type NoneType: return a tensor"),
    "a picture": (v2.ToPILImage(), TypeError, "of type Image: return a tensor or an array"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_another_result_is_refused_with_what_to_do(kind):
    transform, error, advice = WRONG[kind]
    with pytest.raises(
        error, match=rf"must return the image as uint8, \(3, 24, 32\) or \(24, 32, 3\).*{advice}"
    ) as seen:
        OwnTransform(transform).apply(IMAGE, 0, 0)
    assert isinstance(seen.value, lk.LabkitError)


def test_what_a_transform_raises_passes_with_what_it_was_given():
    with pytest.raises(ZeroDivisionError) as seen:
        OwnTransform(lambda image: image[1 // 0]).apply(IMAGE, 0, 0)
    assert seen.value.__notes__ == ["raised by the transform, called with a uint8 tensor (3, 24, 32)"]


@pytest.mark.parametrize("transform", [v1.Compose([v1.ToTensor()]), v1.PILToTensor()], ids=repr)
def test_transforms_of_pictures_say_what_to_use(transform):
    with pytest.raises(
        TypeError, match=r"are of PIL images. Use torchvision.transforms.v2 or Albumentations.*PILDataset"
    ):
        OwnTransform(transform).apply(IMAGE, 0, 0)


@pytest.mark.parametrize(("transform", "reason"), [
    (7, "transform must be a function, or an Albumentations or torchvision v2 transform, got 7"),
    (A.HorizontalFlip, "the class HorizontalFlip itself"),
    (threading.Lock().acquire, "cannot be copied.*open files, locks and connections where they are first used"),
], ids=["a number", "a class", "a lock"])  # fmt: skip
def test_what_cannot_be_called_in_threads_is_refused(transform, reason):
    with pytest.raises(TypeError, match=reason):
        OwnTransform(transform)
