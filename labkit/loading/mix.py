"""MixUp and CutMix on the device that holds the batch, without making the host wait.

Reading a random draw back (`int(tensor)`, `if tensor`) makes the host wait until the device has finished all earlier
work, and the queue of kernels that hides the host's own time runs empty. Here every draw stays a tensor.
"""

from typing import Any

import torch
from torch import Tensor

from labkit.errors import ArgumentError, WrongTypeError
from labkit.util.arguments import require_fraction, require_int, require_positive

_INTEGERS = (
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip


def mixup(
    x: Tensor,
    y: Tensor,
    *,
    alpha: float = 1.0,
    num_classes: int | None = None,
    per_sample: bool = False,
    lam: Tensor | float | None = None,
    partner: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Blend each image, and its label, with another one of the batch.

    Args:
        x: Images, floating point, shape (N, C, H, W).
        y: Class numbers (N,), integers from 0 to `num_classes` - 1; or class probabilities (N, num_classes), floating
            point from 0 to 1, whose rows need not sum to 1 where an image may have several classes.
        alpha: The share that an image keeps is drawn from Beta(alpha, alpha).
        num_classes: Required with class numbers, and with probabilities of a single class.
        per_sample: Draw for each image instead of once for the batch.
        lam: Shares to use instead of drawn ones: a number, or a tensor (1,) or (N,).
        partner: Index of the image that each is blended with, (N,). Default: a random permutation.

    Returns:
        `(images, targets)`: a new tensor like `x`, and float targets (N, num_classes), on x's device.

    Values are checked where they are on the CPU. On a device the host would have to wait for them; there a class number
    out of range fails in torch's kernel (a device-side assertion).

    Raises:
        TypeError: `x` is not floating point, or `x` or `y` is no tensor.
        ValueError: labels of another kind, shape or range, which it names; wrong shapes, `alpha`, `lam` or `partner`.

    Source: Zhang et al., mixup: Beyond Empirical Risk Minimization (2018). Taught in: notebooks/06_kornia_gpu.ipynb
    """
    if not x.is_floating_point():
        raise WrongTypeError(f"{x.dtype} images cannot be blended: convert them first, as with x.float() / 255")
    targets, partner, share = _prepare(x, y, alpha, num_classes, per_sample, lam, partner)
    image_share = share.to(x.dtype).view(-1, 1, 1, 1)
    target_share = share.to(targets.dtype).view(-1, 1)
    return torch.lerp(x[partner], x, image_share), torch.lerp(targets[partner], targets, target_share)


def cutmix(
    x: Tensor,
    y: Tensor,
    *,
    alpha: float = 1.0,
    num_classes: int | None = None,
    per_sample: bool = False,
    lam: Tensor | float | None = None,
    center: Tensor | None = None,
    partner: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Paste a rectangle of another image into each one; labels are mixed by the area that was pasted.

    Args:
        x: Images of any dtype, shape (N, C, H, W).
        y: Class numbers (N,), integers from 0 to `num_classes` - 1; or class probabilities (N, num_classes), floating
            point from 0 to 1, whose rows need not sum to 1 where an image may have several classes.
        alpha: The share that an image keeps is drawn from Beta(alpha, alpha). A rectangle that crosses the border is
            clipped, and the share of the labels corrected.
        num_classes: Required with class numbers, and with probabilities of a single class.
        per_sample: Draw a rectangle for each image instead of one for the batch.
        lam: Shares to use instead of drawn ones: a number, or a tensor (1,) or (N,).
        center: Centers to use instead of drawn ones, (row, column) in pixels: (1, 2) or (N, 2).
        partner: Index of the image that each rectangle comes from, (N,). Default: a random permutation.

    Returns:
        `(images, targets)`: a new tensor like `x`, and float targets (N, num_classes), on x's device.

    Values are checked as in `mixup`.

    Raises:
        TypeError: `x` or `y` is no tensor.
        ValueError: labels of another kind, shape or range, which it names; wrong shapes, `alpha`, `lam`, `center` or
            `partner`.

    Source: Yun et al., CutMix (2019). Taught in: notebooks/06_kornia_gpu.ipynb
    """
    targets, partner, share = _prepare(x, y, alpha, num_classes, per_sample, lam, partner)
    inside, pasted = _rectangle_masks(x, share, center)
    share = (1 - pasted).to(targets.dtype).view(-1, 1)
    return torch.where(inside, x[partner], x), torch.lerp(targets[partner], targets, share)


def _prepare(
    x: Tensor, y: Tensor, alpha: float, num_classes: int | None, per_sample: bool, lam: Any, partner: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Targets, partners and kept shares of a batch, on its device."""
    for name, given in (("x", x), ("y", y)):
        if not isinstance(given, Tensor):
            raise WrongTypeError(f"{name} must be a tensor, got {type(given).__name__}: torch.as_tensor makes one")
    if x.ndim != 4 or y.shape[:1] != x.shape[:1]:
        raise ArgumentError(f"x must be (N, C, H, W) and y hold N labels, got {tuple(x.shape)} and {tuple(y.shape)}")
    require_positive("alpha", alpha)
    targets = _class_probabilities(y, num_classes, x)
    partner = _partner_indices(x, partner)  # drawn before the shares: seeds keep their meaning
    return targets, partner, _kept_shares(x, alpha, per_sample, lam)


def _class_probabilities(y: Tensor, num_classes: int | None, x: Tensor) -> Tensor:
    if num_classes is not None:
        require_int("num_classes", num_classes)
    if y.is_floating_point() and y.ndim == 2 and (num_classes or max(2, y.shape[1])) == y.shape[1]:
        rule = "y must hold probabilities from 0 to 1; class numbers are integers of shape (N,)"
        _check_values(y, 1, rule, slack=0.01)  # for rounding, as after a softmax
        return _send(y, x)
    if y.dtype not in _INTEGERS or y.ndim != 1 or num_classes is None:
        n, given = len(y), f"y is {y.dtype} and num_classes {num_classes}{_remedy(y, num_classes)}"
        raise ArgumentError(
            f"y has shape {tuple(y.shape)}: pass class numbers ({n},), integers, with num_classes=; or probabilities "
            f"({n}, num_classes), floating point. {given}"
        )
    rule = f"num_classes is {num_classes}, so y must hold class numbers from 0 to {num_classes - 1}"
    _check_values(y, num_classes - 1, rule)
    indices = _send(y, x).long().unsqueeze(1)
    return torch.zeros(len(y), num_classes, device=x.device).scatter_(1, indices, 1.0)


def _remedy(y: Tensor, num_classes: int | None) -> str:
    """How labels that are not taken become such ones, where that can be guessed."""
    if y.ndim == 2 and y.shape[1] == 1:
        return ". y.squeeze(1).long() makes class numbers of a column"
    if y.ndim == 1 and y.dtype not in _INTEGERS:
        return ". y.long() makes integers of class numbers"
    if y.ndim == 2 and not y.is_floating_point() and num_classes in (None, y.shape[1]):
        return ". y.float() makes probabilities of one-hot rows"
    return ""


def _send(tensor: Tensor, x: Tensor) -> Tensor:
    """To the device of x. Only a copy to a device may be left running: the host reads its own memory at once."""
    return tensor.to(x.device, non_blocking=x.device.type != "cpu")


def _check_values(tensor: Tensor, highest: float, rule: str, *, slack: float = 0.0) -> None:
    """Refuse values below 0, above `highest` or NaN, where looking at them makes the host wait for no device."""
    if tensor.device.type != "cpu" or torch.compiler.is_compiling():
        return
    try:
        values = (tensor.float() if tensor.is_floating_point() else tensor).detach().numpy()
    except RuntimeError:  # a tensor without values, as in FakeTensorMode
        return
    outside = values[~((values >= -slack) & (values <= highest + slack))]
    if outside.size:
        raise ArgumentError(f"{rule}, got {outside[0]!s}")


def _partner_indices(x: Tensor, partner: Tensor | None) -> Tensor:
    if partner is None:
        # Not randperm: it draws small batches on the CPU, and the copy to the device would make the host wait.
        return torch.rand(len(x), device=x.device).argsort()
    if partner.shape != x.shape[:1]:  # a single partner would be broadcast without an error
        raise ArgumentError(
            f"partner must hold one index for each of {len(x)} images, got shape {tuple(partner.shape)}"
        )
    if partner.dtype not in (torch.int64, torch.int32):  # as an index, others are masks
        raise ArgumentError(f"partner must hold indices as torch.int64, got {partner.dtype}")
    _check_values(partner, len(x) - 1, f"partner must hold indices from 0 to {len(x) - 1}")
    return _send(partner, x)


def _kept_shares(x: Tensor, alpha: float, per_sample: bool, lam: Tensor | float | None) -> Tensor:
    """The shares that images keep, float32, (N,) or (1,)."""
    if isinstance(lam, Tensor):
        if lam.numel() not in (1, len(x)):
            raise ArgumentError(
                f"lam must hold 1 or {len(x)} numbers, one for each image, got shape {tuple(lam.shape)}"
            )
        _check_values(lam, 1, "lam must hold numbers from 0 to 1")
        return _send(lam, x).to(torch.float32).view(-1)
    n = len(x) if per_sample else 1
    if lam is not None:
        return torch.full((n,), float(require_fraction("lam", lam)), device=x.device)
    concentration = torch.full((n,), float(alpha), device=x.device)
    # Validation would read the values back to the host.
    return torch.distributions.Beta(concentration, concentration, validate_args=False).sample()


def _rectangle_masks(x: Tensor, share: Tensor, center: Tensor | None) -> tuple[Tensor, Tensor]:
    """Masks of the rectangles, bool (N or 1, 1, H, W), and the share of the image that each covers, (N or 1,)."""
    reach = 0.5 * (1 - share).sqrt()
    if center is not None:
        if center.shape not in ((1, 2), (len(x), 2)):
            raise ArgumentError(
                f"center must hold (row, column) once or for each of {len(x)} images, got shape {tuple(center.shape)}"
            )
        center = _send(center, x)
    masks, covered = [], torch.ones_like(share)
    for axis, length in enumerate(x.shape[-2:]):
        middle = torch.rand_like(share).mul(length).floor() if center is None else center[:, axis]
        half = reach.mul(length).floor()
        low, high = (middle - half).clamp(min=0), (middle + half).clamp(max=length)
        pixels = torch.arange(length, device=x.device)
        masks.append((pixels >= low.view(-1, 1)) & (pixels < high.view(-1, 1)))
        covered = covered * (high - low) / length
    rows, columns = masks
    return (rows.unsqueeze(2) & columns.unsqueeze(1)).unsqueeze(1), covered
