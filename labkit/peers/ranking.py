"""What the runs of `compare_peers` say, as a table and a plot by class; and the runs that are stored."""

from collections.abc import Iterator
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from labkit.errors import ArgumentError
from labkit.measure.frames import MEASURE_VERSION, load_frame, measured_runs
from labkit.measure.intervals import format_ratio, speedup_interval
from labkit.measure.plots import COLORS, LIMIT, SMALL_PT, make_axes, put_legend_below, write_title
from labkit.measure.statistics import paired_ratios, quiet_summary
from labkit.peers.adapters.own import BEST_DATALOADER, DECODE_LIMIT, MEMCPY_LIMIT, WRITE_LIMIT
from labkit.peers.peer import FULL_SIZE, PART, RAW_PIXELS, SCALED
from labkit.util.machine import NOTEBOOK_FOLDER

_DECODED = {FULL_SIZE: "JPEG decoded at full size", PART: "JPEG decoded in part", SCALED: "JPEG decoded scaled"}
_RESAMPLING = {True: "antialiased", False: "not antialiased", None: "between"}


def peer_table(frame: pd.DataFrame, baseline: str | None = None) -> pd.DataFrame:
    """One row per loader, the fastest first.

    Args:
        frame: Runs as `compare_peers` returns them, or as read back from its CSV.
        baseline: The loader that speed-ups are over; default: the naive one.

    Returns:
        Index `variant`; columns `kind`, `source`, `antialias`, `decoded_at`; `images_per_s` with the 95 % interval of
        its mean (`rate_low`, `rate_high`); `speedup` over the baseline in paired rounds (`ci_low`, `ci_high`);
        `cpu_s_per_1000` images; `peak_mem_mb`; `startup_s`, until the first batch of its first epoch;
        `of_limit`, the share of the limit for its source (decoding alone, copying or writing alone), NaN if the frame
        lacks that limit; and `note`, which says what is unstable.

    Taught in: notebooks/13_peers.ipynb
    """
    runs = measured_runs(frame)
    grouped = runs.groupby("variant", sort=False)
    table = grouped[["kind", "source"]].first().join(quiet_summary(frame, baseline))  # `note` says what it warns of
    flags = runs.drop_duplicates("variant").set_index("variant")["antialias"]  # of a CSV: text and NaN
    table["decoded_at"] = grouped["decoded_at"].first().fillna("")  # empty in a CSV is NaN
    table["antialias"] = flags.map(lambda flag: None if pd.isna(flag) else str(flag) == "True").astype(object)
    table[["rate_low", "rate_high"]] = [
        speedup_interval(grouped.get_group(name)["images_per_s"].to_numpy()) for name in table.index
    ]
    table["of_limit"], is_raw = float("nan"), table["source"] == RAW_PIXELS
    for limit in _drawn_limits(table):
        chosen = is_raw == is_raw[limit]
        table.loc[chosen, "of_limit"] = quiet_summary(runs, limit)["speedup"][chosen]
    first = frame.drop_duplicates("variant").set_index("variant")  # later runs find the workers alive
    table["startup_s"] = first["startup_s"] + first["first_batch_s"]
    return table[list(_COLUMNS)].sort_values("images_per_s", ascending=False)


_COLUMNS = (
    "kind", "source", "antialias", "decoded_at", "images_per_s", "rate_low", "rate_high", "speedup", "ci_low",
    "ci_high", "cpu_s_per_1000", "peak_mem_mb", "startup_s", "of_limit", "note",
)  # fmt: skip


def _drawn_limits(table: pd.DataFrame) -> list[str]:
    """Limits that loaders are held against."""
    return [limit for limit in (DECODE_LIMIT, MEMCPY_LIMIT, WRITE_LIMIT) if limit in table.index]


def class_of(source: str, antialias: bool | None, decoded_at: str) -> str:
    """Name of a class, such as "JPEG decoded at full size, antialiased"."""
    return f"{_DECODED.get(decoded_at, source)}, {_RESAMPLING[antialias]}"


# Columns of `peer_table` that are shown: title, format, and the columns of an interval.
_SHOWN = {
    "images_per_s": ("images/s", ",.0f", ("rate_low", "rate_high")),
    "speedup": ("speed-up", ".2f", ("ci_low", "ci_high")),
    "cpu_s_per_1000": ("CPU s / 1000", ".2f", ()),
    "peak_mem_mb": ("peak MB", ",.0f", ()),
    "startup_s": ("start s", ".1f", ()),
    "of_limit": ("of limit", ".0%", ()),
}


def shown_tables(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """`peer_table` in words, for each class and for the limits."""
    table = peer_table(frame).sort_values("speedup", ascending=False)  # as in the plot

    def write(row: pd.Series) -> dict[str, str]:
        words = {}
        for name, (title, digits, interval) in _SHOWN.items():
            words[title] = "" if pd.isna(row[name]) else f"{row[name]:{digits}}"
            if interval and row[[*interval]].notna().all():  # one round has none
                words[title] += f" [{', '.join(f'{end:{digits}}' for end in row[[*interval]])}]"
        return words

    limits = table["kind"] == "limit"
    groups = {**group_by_class(table[~limits]), "limits": table[limits]}
    return {
        name: pd.DataFrame([write(row) for _, row in rows.iterrows()], rows.index)
        for name, rows in groups.items()
        if len(rows)
    }


def left_out(frame: pd.DataFrame) -> pd.DataFrame:
    """Peers that did not run: `state` is `missing`, with the install command, or `broke`, with the error."""
    return pd.DataFrame(frame.attrs.get("left_out", []), columns=["name", "state", "why"]).set_index("name")


_STYLES = {
    "labkit": {"marker": "D", "color": COLORS[0]},
    "peer": {"marker": "o", "color": COLORS[2]},
    "dataloader": {"marker": "^", "color": COLORS[1]},
    "baseline": {"marker": "s", "color": "0.4"},
}
_LEGEND = {
    "baseline": "naive baseline", "dataloader": "torch's DataLoader, by lk.make_loader", "peer": "another project's",
}  # fmt: skip


def plot_peers(frame: pd.DataFrame, *, ax: Axes | None = None, title: str = "") -> Axes:
    """How many times as fast as `make_loader` each loader is, by class; or images per second where that was not timed.

    Each round's ratio, or each run's rate, is a small dot; their mean, or median, is the large marker and stands on the
    right. The dashed line of a class is that of decoding whole images, or of copying or writing batches, alone.

    Args:
        frame: Runs as `compare_peers` returns them.
        title: Default: how far the fastest two of the largest class are apart.

    Taught in: notebooks/13_peers.ipynb
    """
    runs, has_base = measured_runs(frame), (frame["variant"] == BEST_DATALOADER).any()
    drawn, unit = ("speedup", "{:.2f}x") if has_base else ("images_per_s", "{:,.0f}")
    table = peer_table(frame, BEST_DATALOADER if has_base else None).sort_values(drawn, ascending=False)
    loaders = table[table["kind"] != "limit"]
    groups = group_by_class(loaders)
    ax = ax or make_axes(1.4 + 0.235 * (len(loaders) + len(groups)))
    rows, limits, y = {}, table.loc[_drawn_limits(table)], 0
    for number, (class_name, members) in enumerate(groups.items()):
        top, y, end = y - 0.5, y + 1, y + len(members) + 0.5
        ax.axhspan(top, end, color="0.5", alpha=0.13 * (number % 2 == 0), linewidth=0)
        place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "va": "center", "fontsize": SMALL_PT}
        ax.annotate(class_name, (0.01, y - 1), **place, style="italic")
        is_raw = members["source"].iloc[0] == RAW_PIXELS
        for name, rate in limits.loc[(limits["source"] == RAW_PIXELS) == is_raw, drawn].items():
            ax.plot([rate, rate], [top, end], color=LIMIT, linestyle="--", zorder=1, label=name)
        for name, loader in members.iterrows():
            own = runs[runs["variant"] == name]
            dots = paired_ratios(own, runs[runs["variant"] == BEST_DATALOADER]) if has_base else own
            ax.scatter(dots[drawn], [y] * len(dots), s=12, color="0.65", zorder=2)
            style = {"s": 42, "zorder": 3, **_STYLES[loader["kind"]]}
            ax.scatter(loader[drawn], y, label=_LEGEND.get(loader["kind"], loader["kind"]), **style)
            ax.annotate(unit.format(loader[drawn]), (1.01, y), **place)
            rows[y], y = name, y + 1
    ax.set_yticks(list(rows), list(rows.values()), fontsize=SMALL_PT)
    label = f"times as fast as {BEST_DATALOADER}, in paired rounds" if has_base else "images per second"
    ax.set(xlabel=label, ylabel="", ylim=(y - 0.5, -0.5), xlim=(0, None))
    if not has_base:
        ax.xaxis.set_major_formatter("{x:,.0f}")
    put_legend_below(ax, columns=2)
    write_title(ax, title or describe_fastest(frame, max(groups.values(), key=len)), of_photos=False)  # they are made
    return ax


def leaders(frame: pd.DataFrame) -> dict[str, str]:
    """For each class, how the fastest loader compares with the next, with the interval of paired rounds."""
    table = peer_table(frame)
    return {
        name: describe_fastest(frame, members, interval=True)
        for name, members in group_by_class(table[table["kind"] != "limit"]).items()
    }


def describe_fastest(frame: pd.DataFrame, members: pd.DataFrame, *, interval: bool = False) -> str:
    """The fastest loader of a class, compared with the next."""
    first, *others = members.sort_values("speedup", ascending=False).index
    if not others:
        return f"{first}: {members.loc[first, 'images_per_s']:,.0f} images per second"
    row = quiet_summary(frame, others[0]).loc[first]
    if pd.isna(row["ci_low"]):
        once = "in one round, which has no interval"
        return f"{first} was {format_ratio(row['speedup'])} times as fast as {others[0]} {once}"
    shown = f" [{row['ci_low']:.2f}, {row['ci_high']:.2f}]" * interval
    if row["ci_low"] <= 1 <= row["ci_high"]:
        return f"No clear difference between {first} and {others[0]}{shown}"
    return f"{first} is {format_ratio(row['speedup'])}{shown} times as fast as {others[0]}"


def group_by_class(loaders: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Rows of each class, in the order of `loaders`; JPEG before raw pixels."""
    keys = zip(loaders["source"], loaders["antialias"], loaders["decoded_at"], strict=True)
    return dict(list(loaders.groupby([class_of(*key) for key in keys])))


def stored_runs() -> pd.DataFrame:
    """The runs that are stored next to notebook 13: every class, on one machine, which they name.

    They are the CSVs of `python -m labkit peers --class all`, one after another.

    Raises:
        FileNotFoundError: they are not there.
        ValueError: their figures have another meaning than this version's.

    Taught in: notebooks/13_peers.ipynb
    """
    stored = load_frame(path := NOTEBOOK_FOLDER / "13_peers.csv")
    if (stored["measure"] != MEASURE_VERSION).any():
        raise ArgumentError(
            f"{path} holds figures of measure {sorted(set(stored['measure']))}, and this version writes "
            f"{MEASURE_VERSION}: run all classes again"
        )
    return stored


def comparisons(collection: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Machine (`env_id`), class and runs of each comparison in `stored_runs`, in their order."""
    for (machine, name), runs in collection.groupby(["env_id", "peer_class"], sort=False):
        yield str(machine), str(name), runs
