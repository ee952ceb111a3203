"""`lk.mixup` and `lk.cutmix`: as torchvision's, area counted pixel by pixel, and nothing read back by the host."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.transforms import v2

import labkit as lk
from labkit.course.reference import writeup_cutmix

N, CLASSES, HEIGHT, WIDTH = 6, 10, 20, 31
MIXES = {"mixup": lk.mixup, "cutmix": lk.cutmix}
CLASS_NUMBERS = torch.tensor([0, 3, 3, 9, 1, 7])
IMAGES = torch.rand(N, 3, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(0))
NEIGHBOURS = torch.arange(N).roll(1)  # the partners that torchvision takes
either = pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
both_labels = pytest.mark.parametrize("labels", ["numbers", "probabilities"], indirect=True)
per_batch_and_sample = pytest.mark.parametrize("per_sample", [False, True], ids=["per batch", "per sample"])


@pytest.fixture
def labels(request):
    return CLASS_NUMBERS if request.param == "numbers" else torch.rand(N, CLASSES).softmax(1)


def numbered():
    """Every pixel of an image holds the image's number: whose pixel it was can be read off."""
    return torch.arange(N, dtype=torch.uint8).view(-1, 1, 1, 1).expand(N, 3, HEIGHT, WIDTH).contiguous()


def centered(mix, x):
    """No rectangle reaches over the border."""
    return {} if mix is lk.mixup else {"center": torch.tensor([[x.shape[2] // 2, x.shape[3] // 2]])}


@both_labels
@pytest.mark.parametrize("lam", [0.0, 0.3, 0.85, 1.0])
def test_mixup_is_torchvisions(labels, lam):
    theirs = v2.MixUp(num_classes=CLASSES)
    params = {"labels": labels, "batch_size": N, "lam": lam}
    own, targets = lk.mixup(IMAGES, labels, num_classes=CLASSES, lam=lam, partner=NEIGHBOURS)
    torch.testing.assert_close(own, theirs.transform(IMAGES, params), atol=1e-6, rtol=0)
    torch.testing.assert_close(targets, theirs.transform(labels, params).float(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("center", [(0, 0), (0, 30), (19, 30), (10, 15), (7, 29)])
@pytest.mark.parametrize("lam", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_cutmix_is_torchvisions(lam, center):
    theirs, (row, column) = v2.CutMix(num_classes=CLASSES), center
    half_height, half_width = (int(0.5 * (1 - lam) ** 0.5 * length) for length in (HEIGHT, WIDTH))
    box = (
        max(column - half_width, 0), max(row - half_height, 0),
        min(column + half_width, WIDTH), min(row + half_height, HEIGHT),
    )  # fmt: skip
    left = 1 - (box[2] - box[0]) * (box[3] - box[1]) / (HEIGHT * WIDTH)
    params = {"labels": CLASS_NUMBERS, "batch_size": N, "box": box, "lam_adjusted": left}
    options = {"num_classes": CLASSES, "lam": lam, "center": torch.tensor([center]), "partner": NEIGHBOURS}
    own, targets = lk.cutmix(IMAGES, CLASS_NUMBERS, **options)
    assert torch.equal(own, theirs.transform(IMAGES, params))
    torch.testing.assert_close(targets, theirs.transform(CLASS_NUMBERS, params).float(), atol=1e-6, rtol=0)


def test_mixup_per_sample_is_that_of_numpy():
    shares, partner = np.linspace(0, 1, N, dtype=np.float32), np.array([3, 3, 0, 1, 5, 4])
    given = {"lam": torch.from_numpy(shares), "partner": torch.from_numpy(partner)}
    for found, x in zip(
        lk.mixup(IMAGES, CLASS_NUMBERS, num_classes=CLASSES, **given),
        (IMAGES.numpy(), np.eye(CLASSES)[CLASS_NUMBERS]), strict=True,
    ):  # fmt: skip
        own = shares.reshape(-1, *[1] * (x.ndim - 1))
        np.testing.assert_allclose(found, own * x + (1 - own) * x[partner], atol=1e-6)


@per_batch_and_sample
def test_cutmix_counts_the_pixels_that_it_pasted(per_sample):
    torch.manual_seed(0)
    x, hot, n_cut_off = numbered(), torch.eye(N), 0
    for _ in range(60):
        lam, partner = torch.rand(N if per_sample else 1), torch.arange(N).roll(2)
        mixed, targets = lk.cutmix(x, hot, per_sample=per_sample, lam=lam, partner=partner)
        own = (mixed == x)[:, 0].double().mean((1, 2))
        torch.testing.assert_close(targets.diagonal().double(), own, atol=1e-6, rtol=0)
        torch.testing.assert_close(targets[torch.arange(N), partner].double(), 1 - own, atol=1e-6, rtol=0)
        assert set(mixed.unique().tolist()) <= set(range(N))
        assert torch.equal(mixed[:, 0], mixed[:, 2])  # all channels alike
        n_cut_off += int((own > lam + 0.15).sum())  # rounding to whole pixels alone takes less
    assert n_cut_off > 20  # else the borders would not have been tried


@per_batch_and_sample
def test_what_cutmix_pastes_is_one_rectangle(per_sample):
    torch.manual_seed(1)
    mixed, _ = lk.cutmix(numbered(), torch.eye(N), lam=0.6, per_sample=per_sample, partner=NEIGHBOURS)
    boxes = set()
    for mask in (mixed != numbered())[:, 0]:
        rows, columns = mask.any(1).nonzero().flatten(), mask.any(0).nonzero().flatten()
        box = (int(rows.min()), int(rows.max()) + 1, int(columns.min()), int(columns.max()) + 1)
        assert int(mask.sum()) == (box[1] - box[0]) * (box[3] - box[2])
        boxes.add(box)
    assert len(boxes) == (N if per_sample else 1)


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


class NothingReadBack(TorchDispatchMode):
    """Fails where a tensor becomes a Python number or has a shape that depends on values: there the host would wait."""

    forbidden = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in self.forbidden:
            raise AssertionError(f"{function} is read back")
        return function(*args, **(kwargs or {}))


@either
@per_batch_and_sample
@both_labels
def test_the_host_reads_nothing_back(mix, per_sample, labels):
    with NothingReadBack():
        mix(IMAGES, labels, num_classes=CLASSES, per_sample=per_sample)


READS_BACK = [int, float, bool, lambda one: writeup_cutmix(IMAGES.clone(), CLASS_NUMBERS, CLASSES)]


@pytest.mark.parametrize("reads", READS_BACK, ids=["int", "float", "bool", "the write-ups' CutMix"])
def test_the_watch_sees_every_kind_of_reading_back(reads):
    with NothingReadBack(), pytest.raises(AssertionError, match=r"_local_scalar_dense.* is read back"):
        reads(torch.ones(()))


@either
@pytest.mark.parametrize("n_draws", [1, N])
def test_all_stays_on_the_device(mix, n_draws):
    """By tensors that have a device and no values. Drawing a share is not known to them: the test above covers it."""
    with FakeTensorMode():
        x, y, lam = torch.rand(N, 3, 8, 8, device="cuda"), torch.arange(N, device="cuda"), torch.rand(n_draws)
        on_device, on_host = {"y": y, "lam": lam.cuda()}, {"y": y.cpu(), "lam": lam, "partner": torch.arange(N)}
        for given in (on_device, on_host):
            mixed, targets = mix(x, num_classes=CLASSES, **given)
            assert (mixed.device.type, targets.device.type) == ("cuda", "cuda")
        with pytest.raises(DataDependentOutputException):
            int(y[0])


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


def test_the_write_ups_cutmix_waits_for_cuda(on_cuda):
    with pytest.raises(RuntimeError, match="synchronizing"):
        writeup_cutmix(*on_cuda[:2], CLASSES)


@either
def test_cuda_gives_what_the_cpu_gives(cuda, mix):
    options = {"num_classes": CLASSES, "lam": 0.4, "partner": NEIGHBOURS, **centered(mix, IMAGES)}
    expected = mix(IMAGES, CLASS_NUMBERS, **options)
    for found, one in zip(mix(IMAGES.cuda(), CLASS_NUMBERS, **options), expected, strict=True):
        assert found.is_cuda
        torch.testing.assert_close(found.cpu(), one, atol=1e-6, rtol=0)
