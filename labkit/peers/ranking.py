"""What the runs of `compare_peers` say: table, best peer, plot by class, more cores; and the CSV that collects them."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from labkit.errors import ArgumentError
from labkit.measure.frames import MEASURE_VERSION, load_frame, measured_runs, save_frame
from labkit.measure.plots import COLORS, LIMIT, MARKERS, SMALL_PT, make_axes, put_legend_below, write_title
from labkit.measure.statistics import format_ratio, quiet_summary, speedup_interval
from labkit.peers.adapters.own import DECODE_LIMIT, MEMCPY_LIMIT, WRITE_LIMIT
from labkit.peers.peer import RAW_PIXELS
from labkit.util.machine import NOTEBOOK_FOLDER, name_run

_RESAMPLING = {True: "antialiased", False: "not antialiased", None: "between"}


def peer_table(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per loader, the fastest first.

    Args:
        frame: Runs as `compare_peers` returns them, or as read back from its CSV.

    Returns:
        Index `variant`; columns `kind`, `source`, `antialias`; `images_per_s` with the 95 % interval of its mean
        (`rate_low`, `rate_high`); `speedup` over the baseline in paired rounds (`ci_low`, `ci_high`);
        `cpu_s_per_1000` images; `peak_mem_mb`; `startup_s`, until the first batch of its first epoch;
        `of_limit`, the share of the limit for its source (decoding alone, copying or writing alone), NaN if the frame
        lacks that limit; `gil_us_per_image`, for which its own process holds Python's lock; `batch_size`, `version`;
        `differs`, what it does in another way than the others; and `note`, which says what is unstable.

    Taught in: notebooks/13_peers.ipynb
    """
    runs = measured_runs(frame)
    grouped = runs.groupby("variant", sort=False)
    table = grouped[["kind", "source"]].first().join(quiet_summary(frame))  # `note` says what the warning would
    flags = runs.drop_duplicates("variant").set_index("variant")["antialias"]  # of a CSV: text and NaN
    table["antialias"] = flags.map(lambda flag: None if pd.isna(flag) else str(flag) == "True").astype(object)
    table[["rate_low", "rate_high"]] = [
        speedup_interval(grouped.get_group(name)["images_per_s"].to_numpy()) for name in table.index
    ]
    table["of_limit"], is_raw = float("nan"), table["source"] == RAW_PIXELS
    for limit, chosen in ((DECODE_LIMIT, ~is_raw), (MEMCPY_LIMIT, is_raw), (WRITE_LIMIT, is_raw)):
        if limit in table.index:
            names = table.index[chosen]
            table.loc[names, "of_limit"] = [_compare_two(runs, name, limit)["speedup"] for name in names]
    first = frame.drop_duplicates("variant").set_index("variant")  # later runs find the workers alive
    table["startup_s"] = first["startup_s"] + first["first_batch_s"]
    for name in ("gil_us_per_image", "batch_size", "version", "differs"):
        table[name] = grouped[name].first() if name in runs else float("nan")
    columns = ["kind", "source", "antialias", "images_per_s", "rate_low", "rate_high", "speedup", "ci_low", "ci_high"]
    columns += ["cpu_s_per_1000", "peak_mem_mb", "startup_s", "of_limit", "gil_us_per_image", "batch_size", "version"]
    columns += ["differs", "note"]
    return table[columns].sort_values("images_per_s", ascending=False)


def against_best(frame: pd.DataFrame) -> pd.DataFrame:
    """labkit's rows against the fastest peer of the same class.

    A class is what a loader reads (encoded JPEGs, in files or packed; or raw pixels) and how it resamples. A peer that
    resamples in another way counts in both classes, to labkit's disadvantage.

    Returns:
        One row for each of labkit's: `class`, `best_peer`, `speedup` over it in paired rounds with `ci_low`, `ci_high`
        (95 %) and `verdict`; all empty if its class has no peer.

    Taught in: notebooks/13_peers.ipynb
    """
    table, runs = peer_table(frame), measured_runs(frame)
    is_raw, rows = table["source"] == RAW_PIXELS, []
    for name, own in table[table["kind"] == "labkit"].iterrows():
        same_resampling = table["antialias"].isna() | (table["antialias"] == own["antialias"])
        peers = table[(table["kind"] == "peer") & (is_raw == is_raw[name]) & same_resampling]
        row = {"variant": name, "class": class_of(own["source"], own["antialias"]), "best_peer": ""}
        if len(peers):
            best = peers["images_per_s"].idxmax()
            row |= {"best_peer": best, **_compare_two(runs, name, best)[["speedup", "ci_low", "ci_high", "verdict"]]}
        rows.append(row)
    return pd.DataFrame(rows).set_index("variant")


def _compare_two(runs: pd.DataFrame, name: str, baseline: str) -> pd.Series:
    both = runs[runs["variant"].isin([name, baseline])]  # verdicts are for such pairs; most peers do different work
    return quiet_summary(both.assign(has_verdict=True), baseline).loc[name]


def class_of(source: str, antialias: bool | None) -> str:
    """Name of a class, such as "JPEG, antialiased"."""
    return f"{source if source == RAW_PIXELS else 'JPEG'}, {_RESAMPLING[antialias]}"


def left_out(frame: pd.DataFrame) -> pd.DataFrame:
    """Peers that did not run: `state` is `missing`, with the install command, or `broke`, with the error."""
    return pd.DataFrame(frame.attrs.get("left_out", []), columns=["name", "state", "why"]).set_index("name")


_STYLES = {
    "labkit": {"marker": "D", "color": COLORS[0]},
    "peer": {"marker": "o", "color": COLORS[2]},
    "baseline": {"marker": "s", "color": "0.4"},
}


def plot_peers(frame: pd.DataFrame, *, ax: Axes | None = None, about: str = "", **kwargs: Any) -> Axes:
    """Images per second of each loader, by class: each run as a small dot, the median as a large marker.

    The title compares the fastest two of the largest class.

    The dashed lines of a class are limits of these cores: decoding whole images alone, reading their Huffman codes
    alone, copying or writing the batches alone.
    The scale is logarithmic: equal distances are equal ratios.

    Args:
        frame: Runs as `compare_peers` returns them.
        about: What was compared; the title begins with it.
        **kwargs: Passed to `Axes.scatter` for the medians.

    Taught in: notebooks/13_peers.ipynb
    """
    table = peer_table(frame)
    loaders, limits = table[table["kind"] != "limit"], table[table["kind"] == "limit"]
    groups = group_by_class(loaders)
    ax = ax or make_axes(1.1 + 0.28 * (len(loaders) + len(groups)))
    labels: list[str] = []
    for title, members in groups.items():
        is_raw = members["source"].iloc[0] == RAW_PIXELS
        rates = limits.loc[(limits["source"] == RAW_PIXELS) == is_raw, "images_per_s"].sort_values()
        for number, (name, rate) in enumerate(rates.items()):
            span = [len(labels) - 0.3, len(labels) + len(members) + 0.4]
            ax.plot([rate, rate], span, color=LIMIT, linestyle="--", zorder=1)
            side = "left" if number else "right"  # a higher limit may stand close by
            text = f" {name} {rate:,.0f} "
            ax.annotate(text, (rate, len(labels)), ha=side, va="center", color=LIMIT, fontsize=SMALL_PT)
        labels.append(title)
        for name, loader in members.iterrows():
            median, rates = loader["images_per_s"], measured_runs(frame[frame["variant"] == name])["images_per_s"]
            row = len(labels)
            ax.scatter(rates, [row] * len(rates), s=14, color="0.65", zorder=2)
            ax.scatter(median, row, **{"s": 42, "zorder": 3, **_STYLES[loader["kind"]], **kwargs})
            place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "va": "center", "fontsize": SMALL_PT}
            ax.annotate(f"{median:,.0f}", (1.01, row), **place)
            labels.append(name)
    _label_axes(ax, labels, groups)
    message = _describe_fastest(frame, max(groups.values(), key=len))
    write_title(ax, f"{about}: {message}" if about else message)
    return ax


def _describe_fastest(frame: pd.DataFrame, members: pd.DataFrame) -> str:
    """The fastest loader of a class, compared with the next; inconclusive if its runs cannot tell them apart."""
    ordered = members.sort_values("images_per_s", ascending=False).index
    if len(ordered) == 1:
        return f"{ordered[0]}: {members.loc[ordered[0], 'images_per_s']:,.0f} images per second"
    row = quiet_summary(frame, ordered[1]).loc[ordered[0]]
    doubt = ", inconclusive" if row["ci_low"] <= 1 <= row["ci_high"] else ""  # frames of peers carry no verdict
    return f"{ordered[0]}: {format_ratio(row['speedup'])}x of {ordered[1]}{doubt}"


def group_by_class(loaders: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Rows of each class, in the order of `loaders`; JPEG before raw pixels."""
    classes = [class_of(*pair) for pair in zip(loaders["source"], loaders["antialias"], strict=True)]
    return dict(list(loaders.groupby(classes)))


def _label_axes(ax: Axes, labels: list[str], groups: dict[str, pd.DataFrame]) -> None:
    ax.set_yticks(range(len(labels)), labels)
    for label in ax.get_yticklabels():
        if label.get_text() in groups:
            label.set_fontweight("bold")
    ax.set(xscale="log", xlabel="images per second (logarithmic)", ylabel="", ylim=(len(labels) - 0.4, -0.7))
    left, right = ax.get_xlim()
    ax.set_xlim(left, right * (right / left) ** 0.45)  # room for the name of the highest limit
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if right / left < 100 else (1,)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:,.0f}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.grid(axis="x", alpha=0.3)
    for kind, style in _STYLES.items():
        ax.scatter([], [], label={"baseline": "naive baseline"}.get(kind, kind), **style)
    put_legend_below(ax)


STORED = "13_peers.csv"  # next to the notebook


def append_runs(frame: pd.DataFrame, path: str | os.PathLike) -> pd.DataFrame:
    """Add a comparison to a CSV, which is created if it is not there.

    A run of the same class on the same machine replaces the one before. Runs of other machines stay:
    nothing is compared across machines, since `lk.summarize` refuses that.

    Args:
        frame: Runs of one comparison, as `compare_peers` returns them.
        path: The CSV.

    Returns:
        The whole collection, with the columns `run`, which names each comparison, and `measure`, the version of what
        its figures mean.

    Raises:
        ValueError: the file holds something else, or figures of another meaning; names it and the remedy.
    """
    added = frame.assign(run=name_run(), measure=MEASURE_VERSION)
    if Path(path).exists():
        stored, (machine, name) = read_collection(path), added[["env_id", "peer_class"]].iloc[0]
        others = stored[(stored["env_id"] != machine) | (stored["peer_class"] != name)]
        added = pd.concat([others, added], ignore_index=True)
    save_frame(added, Path(path))
    return added


def read_collection(path: str | os.PathLike) -> pd.DataFrame:
    """Read a collection; errors as for `append_runs`."""
    stored = load_frame(path)
    if not {"run", "measure", "peer_class"} <= set(stored):
        raise ArgumentError(f"{path} is no collection of peers' runs: name another file, which will be created")
    if (stored["measure"] != MEASURE_VERSION).any():
        raise ArgumentError(
            f"{path} holds figures of measure {sorted(set(stored['measure']))}, and this version writes "
            f"{MEASURE_VERSION}: name another file, or run all classes again"
        )
    return stored


def stored_runs() -> pd.DataFrame:
    """The collection that is stored next to notebook 13: every class, on the machine of the stored notebooks.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: its figures have another meaning than this version's.

    Taught in: notebooks/13_peers.ipynb
    """
    return read_collection(NOTEBOOK_FOLDER / STORED)


def comparisons(collection: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Machine (`env_id`), class and runs of each comparison in a collection, in their order."""
    for (machine, name), runs in collection.groupby(["env_id", "peer_class"], sort=False):
        yield str(machine), str(name), runs


CORES = (1, 2, 4, 8, 16, 32, 64, 128)


def predict_cores(table: pd.DataFrame, cores: Sequence[int] = CORES) -> pd.DataFrame:
    """Images per second of threads in one process, on a number of cores: a prediction, not a measurement.

    The cores deliver `cores` / CPU seconds per image, until the lock is held all the time. Memory bandwidth, clock
    rates and hyper-threads are left out, so the truth lies below.

    Args:
        table: As `peer_table` returns it, with `cpu_s_per_1000` and `gil_us_per_image`; rows without both are left out.
        cores: Numbers of cores.

    Returns:
        One row per loader and number of cores: `variant`, `cores`, `images_per_s`, `n_processes`, how many processes
        would lift the bound of the lock, and `simulated` (`"predicted"`).

    Taught in: notebooks/13_peers.ipynb
    """
    known = table.dropna(subset=["cpu_s_per_1000", "gil_us_per_image"])
    rows = []
    for name, row in known[known["gil_us_per_image"] > 0].iterrows():
        lock = 1e6 / row["gil_us_per_image"]
        for number in cores:
            free = number * 1000 / row["cpu_s_per_1000"]
            rows.append({
                "variant": name, "cores": number, "images_per_s": min(free, lock),
                "n_processes": max(1, -int(-free // lock)), "simulated": "predicted",
            })  # fmt: skip
    return pd.DataFrame(rows)


def plot_cores(
    predicted: pd.DataFrame, measured: pd.DataFrame, *, ax: Axes | None = None, about: str = "", **kwargs: Any
) -> Axes:
    """Predicted rates over cores as dashed lines, and what was measured as filled marks.

    The title says where the lock ends the growth of the fastest.

    Args:
        predicted: From `predict_cores`.
        measured: Columns `variant`, as in `predicted`, `cores` and `images_per_s`.
        about: What was measured; the title begins with it.
        **kwargs: Passed to `Axes.plot` for the lines.

    Taught in: notebooks/13_peers.ipynb
    """
    ax = ax or make_axes(5)
    for color, marker, (name, line) in zip(COLORS, MARKERS, predicted.groupby("variant", sort=False), strict=False):
        style = {"linestyle": "--", "color": color, "marker": marker, "markerfacecolor": "white", "label": name}
        ax.plot(line["cores"], line["images_per_s"], **{**style, **kwargs})
        dots = measured[measured["variant"] == name]
        ax.scatter(dots["cores"], dots["images_per_s"], color=color, marker=marker, s=70, zorder=3)
    ax.plot([], [], "--", color="0.4", label="predicted: cores, then the lock")
    ax.scatter([], [], color="0.4", label="measured")
    ax.set(xscale="log", yscale="log", xlabel="cores of one process", ylabel="images per second")
    ax.set_xticks(sorted(set(predicted["cores"])), [str(number) for number in sorted(set(predicted["cores"]))])
    ax.minorticks_off()
    ax.yaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:,.0f}"))
    ax.grid(alpha=0.3)
    put_legend_below(ax, columns=2)
    message = "no loader has a measured lock: nothing is predicted"
    if len(predicted):
        best = predicted[predicted["variant"] == predicted.loc[predicted["images_per_s"].idxmax(), "variant"]]
        first, top = best.iloc[0], best.loc[best["images_per_s"].idxmax()]
        ratio = format_ratio(top["images_per_s"] / first["images_per_s"])
        message = f"{top['variant']} on {top['cores']} cores: predicted {ratio}x of {first['cores']}"
    write_title(ax, f"{about}: {message}" if about else message)
    return ax
