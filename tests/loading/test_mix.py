"""`lk.mixup` and `lk.cutmix`: as torchvision's for the batch and for each image, and the host waits for nothing."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy import stats
from torchvision.transforms import v2

import labkit as lk

N, CLASSES, HEIGHT, WIDTH = 6, 10, 20, 31
MIXES = {"mixup": lk.mixup, "cutmix": lk.cutmix}
CLASS_NUMBERS = torch.tensor([0, 3, 3, 9, 1, 7])
IMAGES = torch.rand(N, 3, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(0))
PROBABILITIES = torch.rand(N, CLASSES, generator=torch.Generator().manual_seed(1)).softmax(1)
NEIGHBOURS = torch.arange(N).roll(1)  # the partners that torchvision takes
either = pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
both_labels = pytest.mark.parametrize("labels", [CLASS_NUMBERS, PROBABILITIES], ids=["numbers", "probabilities"])
per_batch_and_sample = pytest.mark.parametrize("per_sample", [False, True], ids=["per batch", "per sample"])


def numbered():
    """Every pixel of an image holds the image's number: whose pixel it was can be read off."""
    return torch.arange(N, dtype=torch.uint8).view(-1, 1, 1, 1).expand(N, 3, HEIGHT, WIDTH).contiguous()


def centered(mix, x):
    """No rectangle reaches over the border."""
    return {} if mix is lk.mixup else {"center": torch.tensor([[x.shape[2] // 2, x.shape[3] // 2]])}


def by_torchvision(mix, labels, lam, center):
    """A batch in which all images keep the same share, beside a rectangle around the same center."""
    if mix is lk.mixup:
        theirs, params = v2.MixUp(num_classes=CLASSES), {"lam": lam}
    else:
        half_height, half_width = (int(0.5 * (1 - lam) ** 0.5 * length) for length in (HEIGHT, WIDTH))
        top, bottom = max(center[0] - half_height, 0), min(center[0] + half_height, HEIGHT)
        left, right = max(center[1] - half_width, 0), min(center[1] + half_width, WIDTH)
        kept = 1 - (bottom - top) * (right - left) / (HEIGHT * WIDTH)
        theirs, params = v2.CutMix(num_classes=CLASSES), {"box": (left, top, right, bottom), "lam_adjusted": kept}
    params |= {"labels": labels, "batch_size": N}
    return theirs.transform(IMAGES, params), theirs.transform(labels, params).float()


def for_each(values):
    return st.lists(values, min_size=N, max_size=N)


@either
@both_labels
@given(
    for_each(st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0])),
    for_each(st.tuples(st.integers(0, HEIGHT - 1), st.integers(0, WIDTH - 1))),
)
@settings(max_examples=25, deadline=None)
def test_given_shares_and_centers_of_a_batch_and_of_each_image_give_what_torchvision_does(mix, labels, shares, centers):
    def mixed(lam, center):
        options = {"center": torch.tensor(center)} if mix is lk.cutmix else {}
        return mix(IMAGES, labels, num_classes=CLASSES, lam=lam, partner=NEIGHBOURS, **options)

    expected = [by_torchvision(mix, labels, *given) for given in zip(shares, centers, strict=True)]
    for own, theirs in zip(mixed(shares[0], centers[:1]), expected[0], strict=True):
        torch.testing.assert_close(own, theirs, atol=1e-6, rtol=0)
    for number, parts in enumerate(zip(*mixed(torch.tensor(shares), centers), strict=True)):
        for own, theirs in zip(parts, expected[number], strict=True):
            torch.testing.assert_close(own, theirs[number], atol=1e-6, rtol=0)


def test_cutmix_centers_are_spread_evenly():
    """No row or column is favoured; read off rectangles of two by two pixels."""
    torch.manual_seed(2)
    n, size = 4000, 8
    x = torch.zeros(n, 1, size, size, dtype=torch.uint8)
    x[: n // 2] = 1
    options = {"lam": 1 - (2 / size) ** 2, "per_sample": True, "partner": torch.arange(n).flip(0)}
    mixed, _ = lk.cutmix(x, torch.zeros(n, 2), **options)
    for other_axis in (1, 2):
        first = (mixed != x)[:, 0].any(other_axis).int().argmax(1)  # 0 for a center at 0 or 1, c - 1 for c > 1
        counts = torch.bincount(first, minlength=size - 1)
        expected = np.array([2] + [1] * (size - 2)) * n / size
        assert stats.chisquare(counts.numpy(), expected).pvalue > 1e-3


@either
@per_batch_and_sample
@both_labels
def test_targets_sum_to_one_and_nothing_is_changed(mix, per_sample, labels):
    images, before = IMAGES.clone(), labels.clone()
    mixed, targets = mix(images, labels, num_classes=CLASSES, per_sample=per_sample)
    torch.testing.assert_close(targets.sum(1), torch.ones(N), atol=1e-6, rtol=0)
    assert (mixed.shape, mixed.dtype) == (images.shape, images.dtype)
    assert (targets.shape, targets.dtype) == ((N, CLASSES), torch.float32)
    mixed.zero_()  # what is returned shares no memory with what was given
    targets.zero_()
    assert torch.equal(images, IMAGES)
    assert torch.equal(labels, before)


@either
def test_there_is_one_draw_a_batch_or_one_an_image(mix):
    torch.manual_seed(3)
    x, y, partner = torch.rand(64, 1, 32, 32), torch.eye(64), torch.arange(64).roll(1)
    targets = [mix(x, y, per_sample=per_sample, partner=partner)[1] for per_sample in (False, True)]
    one, many = (len(each.diagonal().unique()) for each in targets)
    assert one == 1
    assert many > 20


def drawn_shares(mix, n, *, alpha):
    """Read off black images with white partners: the blend's gray, or the height of the rectangle."""
    height, width = (1, 1) if mix is lk.mixup else (500, 8)
    x = torch.cat([torch.zeros(n, 1, height, width), torch.ones(n, 1, height, width)])
    partner = torch.arange(2 * n).roll(n)
    mixed, _ = mix(x, torch.zeros(2 * n, 2), alpha=alpha, per_sample=True, partner=partner, **centered(mix, x))
    pasted = mixed[:n, 0].amax(2).mean(1).double().numpy()
    return 1 - (pasted if mix is lk.mixup else pasted**2)


@either
@pytest.mark.parametrize("alpha", [0.4, 1.0, 5.0])
def test_shares_are_drawn_from_beta(mix, alpha):
    torch.manual_seed(4)
    shares = drawn_shares(mix, 2000, alpha=alpha)
    low, high = (0.0, 1.0) if mix is lk.mixup else (0.1, 0.9)  # narrower rectangles have no pixel
    shares = shares[(shares >= low) & (shares <= high)]

    def p_value(law):
        cut_off = law.cdf(low)
        return stats.kstest(shares, lambda share: (law.cdf(share) - cut_off) / (law.cdf(high) - cut_off)).pvalue

    assert p_value(stats.beta(alpha, alpha)) > 1e-3
    assert p_value(stats.beta(4 * alpha, 4 * alpha)) < 1e-6  # so the test can fail


@either
def test_partners_are_a_permutation_and_an_image_alone_is_its_own(mix):
    torch.manual_seed(5)
    x, seen = torch.zeros(N, 1, 8, 8), set()
    for _ in range(30):
        _, targets = mix(x, torch.eye(N), lam=0.0, **centered(mix, x))
        partners = targets.argmax(1).tolist()
        assert sorted(partners) == list(range(N))
        seen.add(tuple(partners))
    assert len(seen) > 20
    mixed, targets = mix(IMAGES[:1], torch.tensor([2]), num_classes=3)
    torch.testing.assert_close(mixed, IMAGES[:1])
    assert targets.tolist() == [[0, 0, 1]]


@either
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floats_are_kept(mix, kind):
    """Whatever the images' and the probabilities' types; shares are rounded to them."""
    hot, options = torch.eye(N), {"lam": 0.75, "partner": NEIGHBOURS, **centered(mix, IMAGES)}
    found = mix(IMAGES.to(kind), hot.to(kind), **options)
    for own, expected in zip(found, mix(IMAGES, hot, **options), strict=True):
        assert own.dtype == kind
        torch.testing.assert_close(own.float(), expected, atol=0.01, rtol=0)


def test_cutmix_takes_bytes_and_mixup_names_the_remedy():
    mixed, _ = lk.cutmix(numbered(), CLASS_NUMBERS, num_classes=CLASSES)
    assert mixed.dtype == torch.uint8
    with pytest.raises(TypeError, match=r"torch\.uint8 images cannot be blended.*x\.float\(\) / 255"):
        lk.mixup(numbered(), CLASS_NUMBERS, num_classes=CLASSES)


ACCEPTED = (
    r"pass class numbers \(6,\), integers, with num_classes=; or probabilities \(6, num_classes\), floating point"
)
REFUSED = [
    ({"x": torch.rand(3, 8, 8)}, r"x must be \(N, C, H, W\) and y hold N labels, got \(3, 8, 8\)"),
    ({"y": torch.arange(N - 1)}, r"y hold N labels, got \(6, 3, 20, 31\) and \(5,\)"),
    ({"y": torch.tensor(3)}, r"y hold N labels, got \(6, 3, 20, 31\) and \(\)"),
    ({"y": torch.zeros(N, 2, 2)}, r"y has shape \(6, 2, 2\): pass class numbers"),
    ({"alpha": 0.0}, "alpha must be a number > 0, got 0.0"),
    ({"alpha": float("nan")}, "alpha must be .*, got nan"),
    ({"lam": 1.5}, "lam must be a number from 0 to 1, got 1.5"),
    ({"partner": torch.tensor([1])}, r"partner must hold an integer index for each of 6 .*of shape \(1,\)"),
    ({"partner": torch.ones(N, dtype=torch.bool)}, r"partner must hold an integer index .*, got torch\.bool"),
    ({"y": torch.rand(N, CLASSES) * 6.6}, "y must hold probabilities from 0 to 1; class numbers are integers"),
    ({"y": torch.full((N, CLASSES), torch.nan)}, "y must hold probabilities from 0 to 1; .* nan"),
    ({"y": CLASS_NUMBERS.view(-1, 1)}, rf"shape \(6, 1\): {ACCEPTED}\. y is torch.int64"),
    ({"y": CLASS_NUMBERS.view(-1, 1), "num_classes": None}, rf"shape \(6, 1\): {ACCEPTED}"),
    ({"y": CLASS_NUMBERS.view(-1, 1).float(), "num_classes": None}, r"y is torch\.float32 and num_classes None"),
    ({"y": torch.full((N, 7), 1 / 7), "num_classes": 5}, rf"{ACCEPTED}\. y is torch.float32 and num_classes 5"),
    ({"y": torch.zeros(N, 7, dtype=torch.int64), "num_classes": 5}, r"shape \(6, 7\): .* num_classes 5"),
    ({"y": torch.eye(N).long(), "num_classes": None}, r"y is torch\.int64"),
    ({"y": torch.eye(N).bool(), "num_classes": N}, r"y is torch\.bool and num_classes 6"),
    ({"y": CLASS_NUMBERS.float()}, r"shape \(6,\): .*y is torch\.float32"),
    ({"y": CLASS_NUMBERS > 3, "num_classes": 2}, r"y is torch\.bool"),
    ({"num_classes": None}, rf"shape \(6,\): {ACCEPTED}\. y is torch.int64 and num_classes None$"),
    ({"num_classes": 0}, "num_classes must be an integer >= 1, got 0"),
    ({"num_classes": 2.5}, "num_classes must be an integer >= 1, got 2.5"),
    ({"num_classes": 9}, "y must hold class numbers from 0 to 8: index .* is out of"),
    ({"y": CLASS_NUMBERS - 1}, "y must hold class numbers from 0 to 9: index .* is out of"),
]


@either
@pytest.mark.parametrize(("change", "said"), REFUSED)
def test_what_cannot_be_mixed_is_refused_with_what_is_accepted(mix, change, said):
    arguments = {"x": IMAGES, "y": CLASS_NUMBERS, "num_classes": CLASSES, **change}
    with pytest.raises(ValueError, match=said):
        mix(arguments.pop("x"), arguments.pop("y"), **arguments)


@either
def test_labels_that_are_no_tensor_are_refused(mix):
    with pytest.raises(TypeError, match=r"y must be a tensor, got list: torch\.as_tensor makes one"):
        mix(IMAGES, CLASS_NUMBERS.tolist(), num_classes=CLASSES)


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16])
def test_class_numbers_of_every_integer_type_are_torchvisions(kind):
    params = {"labels": CLASS_NUMBERS, "batch_size": N, "lam": 0.3}
    theirs = v2.MixUp(num_classes=CLASSES).transform(CLASS_NUMBERS, params)
    _, targets = lk.mixup(IMAGES, CLASS_NUMBERS.to(kind), num_classes=CLASSES, lam=0.3, partner=NEIGHBOURS)
    torch.testing.assert_close(targets, theirs.float(), atol=1e-6, rtol=0)


@either
def test_probabilities_may_be_of_one_class_or_of_several_at_once(mix):
    one, several = torch.tensor([[0.0], [1], [1], [0], [1], [0]]), torch.ones(N, CLASSES)
    assert mix(IMAGES, one, num_classes=1)[1].shape == (N, 1)
    assert torch.equal(mix(IMAGES, several)[1], several)


# On a device the host waits for nothing


def test_labels_on_a_device_reach_images_on_the_host_whole(cuda):
    """A copy to the host that is left running is read before it has come."""
    y = CLASS_NUMBERS.cuda()
    torch.cuda._sleep(20_000_000)
    y = y + torch.ones_like(y) - 1
    _, targets = lk.mixup(IMAGES, y, num_classes=CLASSES, lam=1.0)
    assert targets.argmax(1).tolist() == CLASS_NUMBERS.tolist()


@pytest.fixture
def on_cuda(cuda):
    """Made, and its kernels loaded, before CUDA raises where the host would wait for the device."""
    x, y = torch.rand(64, 3, 32, 32, device="cuda"), torch.arange(64, device="cuda") % CLASSES
    lk.mixup(x, y, num_classes=CLASSES)
    soft = torch.eye(CLASSES, device="cuda")[y]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield x, y, soft
    torch.cuda.set_sync_debug_mode("default")


@either
@per_batch_and_sample
def test_the_host_does_not_wait_for_cuda(mix, per_sample, on_cuda):
    x, *both = on_cuda
    for labels in both:
        mix(x, labels, num_classes=CLASSES, per_sample=per_sample)
        mix(x, labels, num_classes=CLASSES, per_sample=per_sample, lam=0.3, partner=torch.arange(64, device="cuda"))


def test_a_draw_that_is_read_back_waits_for_cuda(on_cuda):
    with pytest.raises(RuntimeError, match="synchronizing"):
        int(on_cuda[0][0, 0, 0, 0])


@either
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_cuda_gives_what_the_cpu_gives_wherever_labels_and_shares_are(cuda, mix, place):
    given = {"y": CLASS_NUMBERS, "lam": torch.linspace(0, 1, N), "partner": NEIGHBOURS, **centered(mix, IMAGES)}
    expected = mix(IMAGES, num_classes=CLASSES, **given)
    there = {name: value.to(place) for name, value in given.items()}
    for found, one in zip(mix(IMAGES.cuda(), num_classes=CLASSES, **there), expected, strict=True):
        assert found.is_cuda
        torch.testing.assert_close(found.cpu(), one, atol=1e-6, rtol=0)
