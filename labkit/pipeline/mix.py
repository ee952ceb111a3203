"""MixUp and CutMix where the batch is: on the device, without the host waiting for it.

A draw that the host reads back (`int(tensor)`, `if tensor`) stops it until the device has done all earlier work, and
the queue that hides the host's own time runs empty. Here every draw stays a tensor.
"""

import torch
from torch import Tensor


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
    """Blend each image with another one of the batch, and their labels alike.

    Args:
        x: Images, floating point, shape (N, C, H, W).
        y: Class numbers (N,), with `num_classes`; or class probabilities (N, num_classes).
        alpha: The image's own share is drawn from Beta(alpha, alpha).
        num_classes: Needed for class numbers.
        per_sample: One draw for each image instead of one for the batch.
        lam: Own shares instead of drawn ones: a number, or a tensor (1,) or (N,).
        partner: Which image each is blended with, (N,); default: a random permutation.

    Returns:
        `(images, targets)`: a new tensor like `x`, and float targets (N, num_classes), on x's device.

    Raises:
        TypeError: `x` is not floating point.
        ValueError: a shape, `alpha` or `lam` that cannot be.

    Source: Zhang et al., mixup: Beyond Empirical Risk Minimization (2018). Taught in: notebooks/06_kornia_gpu.ipynb
    """
    _check(x, y, alpha)
    if not x.is_floating_point():
        raise TypeError(f"{x.dtype} images cannot be blended: convert them first, as with x.float() / 255")
    targets = _probabilities(y, num_classes, x)
    partner = _partners(x, partner)
    share = _shares(x, alpha, per_sample, lam)
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
    """Paste a rectangle of another image into each one; labels are mixed by the area that was really pasted.

    Args:
        x: Images of any dtype, shape (N, C, H, W).
        y: Class numbers (N,), with `num_classes`; or class probabilities (N, num_classes).
        alpha: The image's own share is drawn from Beta(alpha, alpha); a rectangle over the border is cut off there, and
            the labels' share corrected.
        num_classes: Needed for class numbers.
        per_sample: One rectangle for each image instead of one for the batch.
        lam: Own shares instead of drawn ones: a number, or a tensor (1,) or (N,).
        center: Rectangles' centers instead of drawn ones, (row, column) in pixels: (1, 2) or (N, 2).
        partner: Which image each gets a rectangle of, (N,); default: a random permutation.

    Returns:
        `(images, targets)`: a new tensor like `x`, and float targets (N, num_classes), on x's device.

    Raises:
        ValueError: a shape, `alpha` or `lam` that cannot be.

    Source: Yun et al., CutMix (2019). Taught in: notebooks/06_kornia_gpu.ipynb
    """
    _check(x, y, alpha)
    targets = _probabilities(y, num_classes, x)
    partner = _partners(x, partner)
    share = _shares(x, alpha, per_sample, lam)
    inside, pasted = _rectangles(x, share, center)
    share = (1 - pasted).to(targets.dtype).view(-1, 1)
    return torch.where(inside, x[partner], x), torch.lerp(targets[partner], targets, share)


def _check(x: Tensor, y: Tensor, alpha: float) -> None:
    if x.ndim != 4 or len(y) != len(x):
        raise ValueError(f"images (N, C, H, W) and N labels are wanted, not {tuple(x.shape)} and {tuple(y.shape)}")
    if not alpha > 0:
        raise ValueError(f"alpha={alpha}: a positive number is wanted")


def _probabilities(y: Tensor, num_classes: int | None, x: Tensor) -> Tensor:
    y = y.to(x.device, non_blocking=True)
    if y.ndim == 2:
        return y if y.is_floating_point() else y.to(torch.float32)
    if y.ndim != 1 or num_classes is None:
        raise ValueError(f"labels of shape {tuple(y.shape)}: pass num_classes= with class numbers (N,)")
    return torch.zeros(len(y), num_classes, device=x.device).scatter_(1, y.view(-1, 1).long(), 1.0)


def _partners(x: Tensor, partner: Tensor | None) -> Tensor:
    if partner is None:
        # Not randperm: for small batches it draws on the CPU, and its copy to the device waits.
        return torch.rand(len(x), device=x.device).argsort()
    if partner.shape != x.shape[:1]:  # one partner for all would pass as well, by broadcasting
        raise ValueError(f"partner of shape {tuple(partner.shape)}: one number for each of {len(x)} images is wanted")
    return partner.to(x.device, non_blocking=True)


def _shares(x: Tensor, alpha: float, per_sample: bool, lam: Tensor | float | None) -> Tensor:
    """The images' own shares, float32, (N,) or (1,)."""
    if isinstance(lam, Tensor):
        if lam.numel() not in (1, len(x)):
            raise ValueError(f"lam of shape {tuple(lam.shape)}: wanted is one, or one for each of {len(x)} images")
        return lam.to(x.device, torch.float32, non_blocking=True).view(-1)
    n = len(x) if per_sample else 1
    if lam is not None:
        if not 0 <= lam <= 1:
            raise ValueError(f"lam={lam}: a share between 0 and 1 is wanted")
        return torch.full((n,), float(lam), device=x.device)
    concentration = torch.full((n,), float(alpha), device=x.device)
    # Validating would read the values back.
    return torch.distributions.Beta(concentration, concentration, validate_args=False).sample()


def _rectangles(x: Tensor, share: Tensor, center: Tensor | None) -> tuple[Tensor, Tensor]:
    """Where each rectangle lies, bool (N or 1, 1, H, W), and the share of the picture that it covers, (N or 1,)."""
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
