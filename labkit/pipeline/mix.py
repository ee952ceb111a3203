"""MixUp and CutMix on the device that holds the batch, without making the host wait.

Reading a random draw back (`int(tensor)`, `if tensor`) makes the host wait until the device has finished all earlier
work, and the queue of kernels that hides the host's own time runs empty. Here every draw stays a tensor.
"""

from typing import Any

import torch
from torch import Tensor

from labkit.core import require_fraction, require_positive


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
        y: Class numbers (N,), with `num_classes`; or class probabilities (N, num_classes).
        alpha: The share that an image keeps is drawn from Beta(alpha, alpha).
        num_classes: Required with class numbers.
        per_sample: Draw for each image instead of once for the batch.
        lam: Shares to use instead of drawn ones: a number, or a tensor (1,) or (N,).
        partner: Index of the image that each is blended with, (N,). Default: a random permutation.

    Returns:
        `(images, targets)`: a new tensor like `x`, and float targets (N, num_classes), on x's device.

    Raises:
        TypeError: `x` is not floating point.
        ValueError: wrong shapes, `alpha` or `lam`.

    Source: Zhang et al., mixup: Beyond Empirical Risk Minimization (2018). Taught in: notebooks/06_kornia_gpu.ipynb
    """
    if not x.is_floating_point():
        raise TypeError(f"{x.dtype} images cannot be blended: convert them first, as with x.float() / 255")
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
        y: Class numbers (N,), with `num_classes`; or class probabilities (N, num_classes).
        alpha: The share that an image keeps is drawn from Beta(alpha, alpha). A rectangle that crosses the border is
            clipped, and the share of the labels corrected.
        num_classes: Required with class numbers.
        per_sample: Draw a rectangle for each image instead of one for the batch.
        lam: Shares to use instead of drawn ones: a number, or a tensor (1,) or (N,).
        center: Centers to use instead of drawn ones, (row, column) in pixels: (1, 2) or (N, 2).
        partner: Index of the image that each rectangle comes from, (N,). Default: a random permutation.

    Returns:
        `(images, targets)`: a new tensor like `x`, and float targets (N, num_classes), on x's device.

    Raises:
        ValueError: wrong shapes, `alpha` or `lam`.

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
    if x.ndim != 4 or len(y) != len(x):
        raise ValueError(f"x must be (N, C, H, W) and y hold N labels, got {tuple(x.shape)} and {tuple(y.shape)}")
    require_positive("alpha", alpha)
    targets = _class_probabilities(y, num_classes, x)
    partner = _partner_indices(x, partner)  # drawn before the shares: seeds keep their meaning
    return targets, partner, _kept_shares(x, alpha, per_sample, lam)


def _class_probabilities(y: Tensor, num_classes: int | None, x: Tensor) -> Tensor:
    y = y.to(x.device, non_blocking=True)
    if y.ndim == 2:
        return y if y.is_floating_point() else y.to(torch.float32)
    if y.ndim != 1 or num_classes is None:
        raise ValueError(f"y has shape {tuple(y.shape)}: pass class numbers (N,) with num_classes=")
    return torch.zeros(len(y), num_classes, device=x.device).scatter_(1, y.view(-1, 1).long(), 1.0)


def _partner_indices(x: Tensor, partner: Tensor | None) -> Tensor:
    if partner is None:
        # Not randperm: it draws small batches on the CPU, and the copy to the device would make the host wait.
        return torch.rand(len(x), device=x.device).argsort()
    if partner.shape != x.shape[:1]:  # a single partner would be broadcast without an error
        raise ValueError(f"partner must hold one index for each of {len(x)} images, got shape {tuple(partner.shape)}")
    return partner.to(x.device, non_blocking=True)


def _kept_shares(x: Tensor, alpha: float, per_sample: bool, lam: Tensor | float | None) -> Tensor:
    """The shares that images keep, float32, (N,) or (1,)."""
    if isinstance(lam, Tensor):
        if lam.numel() not in (1, len(x)):
            raise ValueError(f"lam must hold 1 or {len(x)} numbers, one for each image, got shape {tuple(lam.shape)}")
        return lam.to(x.device, torch.float32, non_blocking=True).view(-1)
    n = len(x) if per_sample else 1
    if lam is not None:
        return torch.full((n,), float(require_fraction("lam", lam)), device=x.device)
    concentration = torch.full((n,), float(alpha), device=x.device)
    # Validation would read the values back to the host.
    return torch.distributions.Beta(concentration, concentration, validate_args=False).sample()


def _rectangle_masks(x: Tensor, share: Tensor, center: Tensor | None) -> tuple[Tensor, Tensor]:
    """Masks of the rectangles, bool (N or 1, 1, H, W), and the share of the image that each covers, (N or 1,)."""
    reach = 0.5 * (1 - share).sqrt()
    center = None if center is None else center.to(x.device, non_blocking=True)
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
