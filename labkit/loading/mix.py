"""MixUp and CutMix on the device that holds the batch, without making the host wait.

Reading a random draw back (`int(tensor)`, `if tensor`) makes the host wait until the device has finished all earlier
work, and the queue of kernels that hides the host's own time runs empty. Here every draw stays a tensor.
"""

from typing import Any

import torch
from torch import Tensor

from labkit.errors import ArgumentError, WrongTypeError
from labkit.util.arguments import require_fraction, require_int, require_positive


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

    >>> images, targets = lk.mixup(torch.rand(8, 3, 32, 32), torch.arange(8), num_classes=10, alpha=0.2)
    >>> images.shape, targets.shape
    (torch.Size([8, 3, 32, 32]), torch.Size([8, 10]))

    Raises:
        TypeError: `x` is not floating point, or `x` or `y` is no tensor.
        ValueError: labels of another kind or shape, which it names; a class number out of range (on a device, torch's
            kernel fails); a wrong shape of `x` or `partner`; a wrong `alpha` or `lam`.

    Source: Zhang et al., mixup: Beyond Empirical Risk Minimization (2018). Taught in: notebooks/06_kornia_gpu.ipynb
    """
    if isinstance(x, Tensor) and not x.is_floating_point():
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

    >>> images, targets = lk.cutmix(torch.rand(8, 3, 32, 32), torch.arange(8), num_classes=10)
    >>> targets.sum(1)
    tensor([1., 1., 1., 1., 1., 1., 1., 1.])

    Raises:
        TypeError: `x` or `y` is no tensor.
        ValueError: As `mixup`.

    Source: Yun et al., CutMix (2019). Taught in: notebooks/06_kornia_gpu.ipynb
    """
    targets, partner, share = _prepare(x, y, alpha, num_classes, per_sample, lam, partner)
    inside, pasted = _rectangle_masks(x, share, center)
    share = (1 - pasted).to(targets.dtype).view(-1, 1)
    return torch.where(inside, x[partner], x), torch.lerp(targets[partner], targets, share)


def _prepare(
    x: Tensor, y: Tensor, alpha: float, num_classes: int | None, per_sample: bool, lam: Any, partner: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Targets (N, num_classes), partners (N,) and kept shares, float32, (N,) or (1,), on the device of the batch."""
    for name, given in (("x", x), ("y", y)):
        if not isinstance(given, Tensor):
            raise WrongTypeError(f"{name} must be a tensor, got {type(given).__name__}: torch.as_tensor makes one")
    if x.ndim != 4 or y.shape[:1] != x.shape[:1]:
        raise ArgumentError(f"x must be (N, C, H, W) and y hold N labels, got {tuple(x.shape)} and {tuple(y.shape)}")
    require_positive("alpha", alpha)
    targets = _class_probabilities(y, num_classes, x)
    if partner is None:  # drawn before the shares: seeds keep their meaning
        # Not randperm: it draws small batches on the CPU, and the copy to the device would make the host wait.
        partner = torch.rand(len(x), device=x.device).argsort()
    elif partner.shape != x.shape[:1] or partner.dtype not in (torch.int64, torch.int32):  # else broadcast, or a mask
        raise ArgumentError(
            f"partner must hold an integer index for each of {len(x)} images, got {partner.dtype} of shape "
            f"{tuple(partner.shape)}"
        )
    if isinstance(lam, Tensor):
        share = _send(lam, x).to(torch.float32).view(-1)
    elif lam is not None:
        share = torch.full((len(x) if per_sample else 1,), float(require_fraction("lam", lam)), device=x.device)
    else:
        concentration = torch.full((len(x) if per_sample else 1,), float(alpha), device=x.device)
        # Validation would read the values back to the host.
        share = torch.distributions.Beta(concentration, concentration, validate_args=False).sample()
    return targets, _send(partner, x), share


def _class_probabilities(y: Tensor, num_classes: int | None, x: Tensor) -> Tensor:
    if y.is_floating_point() and y.ndim == 2 and (num_classes or max(2, y.shape[1])) == y.shape[1]:
        if _can_be_seen(y):
            values = y.detach().float().numpy()
            wrong = values[~((values >= -0.01) & (values <= 1.01))]  # for rounding, as after a softmax
            if wrong.size:
                raise ArgumentError(
                    "y must hold probabilities from 0 to 1; class numbers are integers of shape (N,), got "
                    f"{wrong[0]:.4g}"
                )
        return _send(y, x)
    if y.is_floating_point() or y.dtype == torch.bool or y.ndim != 1 or num_classes is None:
        raise ArgumentError(
            f"y has shape {tuple(y.shape)}: pass class numbers ({len(y)},), integers, with num_classes=; or "
            f"probabilities ({len(y)}, num_classes), floating point. y is {y.dtype} and num_classes {num_classes}"
        )
    targets = torch.zeros(len(y), require_int("num_classes", num_classes), device=x.device)
    try:
        return targets.scatter_(1, _send(y, x).long().unsqueeze(1), 1.0)
    except RuntimeError as error:
        if "out of bounds" not in str(error):
            raise
        raise ArgumentError(f"y must hold class numbers from 0 to {num_classes - 1}: {error}") from None


def _can_be_seen(tensor: Tensor) -> bool:
    """Whether its values can be looked at without the host waiting for a device: not while torch compiles, either."""
    return type(tensor) is Tensor and tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def _send(tensor: Tensor, x: Tensor) -> Tensor:
    """Copy to the device of x. Only a copy to a device may be left running: the host reads its memory at once."""
    return tensor.to(x.device, non_blocking=x.device.type != "cpu")


def _rectangle_masks(x: Tensor, share: Tensor, center: Tensor | None) -> tuple[Tensor, Tensor]:
    """Masks of the rectangles, bool (N or 1, 1, H, W), and the share of the image that each covers, (N or 1,)."""
    reach = 0.5 * (1 - share).sqrt()
    center = None if center is None else _send(center, x)
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
