"""What the runs of `compare_peers` say: the table, labkit's rows against the best peer, and the plot by class."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from labkit.measure.frames import measured_runs
from labkit.measure.plots import COLORS, LIMIT, SMALL_PT, make_axes, put_legend_below, write_title
from labkit.measure.statistics import format_ratio, quiet_summary, speedup_interval
from labkit.peers.adapters.own import DECODE_LIMIT, MEMCPY_LIMIT, WRITE_LIMIT
from labkit.peers.peer import RAW_PIXELS

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
    message = _tell_fastest(frame, max(groups.values(), key=len))
    write_title(ax, f"{about}: {message}" if about else message)
    return ax


def _tell_fastest(frame: pd.DataFrame, members: pd.DataFrame) -> str:
    """The fastest loader of a class, beside the next; inconclusive if its runs cannot tell them apart."""
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
