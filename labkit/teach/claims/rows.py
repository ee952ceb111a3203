"""What a row of the claims' ledger is made of, and the ratios that are reckoned for a disk that is not there."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from labkit.data.stores import DISKS
from labkit.teach.claims import trials
from labkit.teach.claims.frames import Read, on_gpu
from labkit.teach.claims.verdicts import Rule, tried

_SEEK_S = DISKS["hdd"].seek_ms / 1e3
HYPERSIM_FILES, ITERATION_FILES = 2 * 53_885, 64  # of Marigold's list for training, and of one of its iterations


@dataclass(frozen=True)
class Test:
    """One setting in which a claim is tested.

    Args:
        setting: In words; what a verdict "under a condition" names.
        notebook: Number of the notebook that measures it, or is about it where it is tried on the spot.
        read: Gives the reading, or None where nothing has been measured.
        rule: From the reading (and the claimed ratio) to an outcome.
        needs_gpu: Only runs on a CUDA device count.
    """

    setting: str
    notebook: str
    read: Read
    rule: Rule
    needs_gpu: bool = False


@dataclass(frozen=True)
class Claim:
    """A row of the ledger.

    Args:
        id: As the table of claims has it.
        text: The claim, in our words.
        figure: Its figure, as the write-up gives it.
        tests: What the verdict is made of.
        claimed: The ratio that the figure states or implies; None where it states a direction.
        asides: Read and shown, but not judged: what a CPU can say of a claim about GPUs.
        note: What has to be known to read the row.
    """

    id: str
    text: str
    figure: str
    tests: tuple[Test, ...]
    claimed: float | None = None
    asides: tuple[Test, ...] = ()
    note: str = ""


def gpu_test(setting: str, notebook: str, read: Read, rule: Rule) -> Test:
    return Test(setting, notebook, on_gpu(read), rule, needs_gpu=True)


def tried_test(setting: str, notebook: str, function: trials.Trial) -> Test:
    return Test(setting, notebook, trials.trial(function), tried)


def with_seeks(n_seeks: int) -> Callable[[np.ndarray], np.ndarray]:
    """Time an image with the moves of a disk's head, over the time without."""
    return lambda rates: 1 + n_seeks * _SEEK_S * rates


def tar_over_folder(n_scanned: int) -> Callable[[np.ndarray], np.ndarray]:
    """Time of an iteration from a tar on a rotating disk, over that from a folder there; `rates` in pairs/s.

    A file in a folder costs two moves of the head, a member of a tar one, a header that is scanned one.
    """

    def ratio(rates: np.ndarray) -> np.ndarray:
        computed_s = ITERATION_FILES / 2 / rates
        tar_s = (n_scanned + ITERATION_FILES) * _SEEK_S
        return (tar_s + computed_s) / (2 * ITERATION_FILES * _SEEK_S + computed_s)

    return ratio
