"""Plots of the oracle set: each file as each decoder returns it."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from labkit.measure import SMALL_PT, WIDTH_IN, make_axes, write_title
from labkit.teach.conformance import conformance, default_call, oracle_files, reference

_OUTCOMES = ("same", "refused", "differs")
_SIGNS = {"same": "=", "refused": "x", "differs": "!"}


def plot_pictures(files: Sequence[str], decoders: Sequence[str]) -> Figure:
    """Draw oracle files (rows) as decoded by each library's first example (columns), beside the right answer.

    The shape is written under each picture, or the error of a library that refuses the file.
    """
    figure, axes = plt.subplots(
        len(files), len(decoders) + 1, figsize=(WIDTH_IN, 0.4 + 1.05 * len(files)),
        layout="constrained", squeeze=False,
    )  # fmt: skip
    for row, name in enumerate(files):
        data = oracle_files()[name]
        _show(axes[row, 0], reference(data), "upright RGB")
        axes[row, 0].set_ylabel(name.replace(" ", "\n", 1), rotation=0, ha="right", va="center")
        for column, decoder in enumerate(decoders, 1):
            _show_decoded(axes[row, column], data, decoder)
    for axis, title in zip(axes[0], ["what it shows", *decoders], strict=True):
        axis.set_title(title, fontsize=SMALL_PT)
    found = conformance({name: oracle_files()[name] for name in files}, by_default=True)
    write_title(figure, _tell_agreement(found[found["decoder"].isin(list(decoders))]))
    return figure


def _tell_agreement(table: pd.DataFrame) -> str:
    """Which decoder gives the right pixels of most files, and which of the fewest."""
    same = (table["outcome"] == "same").groupby(table["decoder"], sort=False).sum()
    n_files = table["file"].nunique()
    best, worst = ([name for name in same.index if same[name] == limit] for limit in (same.max(), same.min()))
    told = f"{' and '.join(best)}: the right pixels of {same.max()} of {n_files} files"
    return told if best == worst else f"{told}; {' and '.join(worst)}: those of {same.min()}"


def plot_conformance(table: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Draw the table of `conformance`: files in rows, decoders in columns; signs repeat the colours.

    Args:
        table: The result of `labkit.conformance`.
        ax: Axes to draw on; default: a new figure.
    """
    wide = table.pivot(index="file", columns="decoder", values="outcome")
    wide = wide.loc[list(dict.fromkeys(table["file"])), list(dict.fromkeys(table["decoder"]))]
    ax = ax or make_axes(1.1 + 0.22 * len(wide))
    codes = wide.map(_OUTCOMES.index).to_numpy()
    colors = ListedColormap(["#b7e1cd", "#c6d9f1", "#d55e00"])
    ax.imshow(codes, cmap=colors, vmin=0, vmax=len(_OUTCOMES) - 1, aspect="auto")
    for (row, column), code in np.ndenumerate(codes):
        ax.text(column, row, _SIGNS[_OUTCOMES[code]], ha="center", va="center", fontsize=SMALL_PT)
    ax.set_xticks(range(len(wide.columns)), wide.columns)
    ax.set_yticks(range(len(wide)), wide.index, fontsize=SMALL_PT)
    ax.xaxis.tick_top()
    ax.set_xlabel("=  same pixels as Pillow        x  refused with DecodeError        !  differs", fontsize=SMALL_PT)
    write_title(ax, _tell_agreement(table))
    return ax


def _show_decoded(ax: Axes, data: bytes, decoder: str) -> None:
    try:
        pixels = default_call(data, decoder)
    except Exception as error:
        ax.text(0.5, 0.5, "refused", ha="center", va="center", transform=ax.transAxes)
        _strip_axes(ax, type(error).__name__)
        return
    _show(ax, pixels, " x ".join(map(str, pixels.shape)) + ("" if pixels.dtype == np.uint8 else f"\n{pixels.dtype}"))


def _show(ax: Axes, pixels: np.ndarray, caption: str) -> None:
    if pixels.dtype != np.uint8:
        pixels = (pixels >> 8).astype(np.uint8)
    if pixels.ndim == 3 and pixels.shape[2] in (1, 2):
        pixels = pixels[..., 0]
    # The four channels of a CMYK file are shown as RGBA, which a network would take them for.
    ax.imshow(pixels, cmap="gray", vmin=0, vmax=255)
    _strip_axes(ax, caption)


def _strip_axes(ax: Axes, caption: str) -> None:
    ax.set(xticks=[], yticks=[])
    ax.set_xlabel(caption, fontsize=SMALL_PT)
    for spine in ax.spines.values():
        spine.set_visible(False)
