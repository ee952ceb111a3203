"""What the runs of `compare_peers` say: table, best peer, plot by class; and the CSV that collects them."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from labkit.errors import ArgumentError
from labkit.measure.frames import MEASURE_VERSION, load_frame, measured_runs, save_frame
from labkit.measure.plots import COLORS, LIMIT, SMALL_PT, make_axes, put_legend_below, write_title
from labkit.measure.statistics import format_ratio, paired_ratios, quiet_summary, speedup_interval
from labkit.peers.adapters.own import BEST_DATALOADER, DECODE_LIMIT, MEMCPY_LIMIT, WRITE_LIMIT
from labkit.peers.peer import RAW_PIXELS
from labkit.util.machine import NOTEBOOK_FOLDER, name_run

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
        lacks that limit; `batch_size`, `version`; `differs`, what it does in another way than the others; and `note`,
        which says what is unstable.

    Taught in: notebooks/13_peers.ipynb
    """
    runs = measured_runs(frame)
    grouped = runs.groupby("variant", sort=False)
    table = (
        grouped[["kind", "source"]].first().join(quiet_summary(frame, baseline))
    )  # `note` says what the warning would
    flags = runs.drop_duplicates("variant").set_index("variant")["antialias"]  # of a CSV: text and NaN
    table["decoded_at"] = grouped["decoded_at"].first().fillna("")  # empty in a CSV is NaN
    table["antialias"] = flags.map(lambda flag: None if pd.isna(flag) else str(flag) == "True").astype(object)
    table[["rate_low", "rate_high"]] = [
        speedup_interval(grouped.get_group(name)["images_per_s"].to_numpy()) for name in table.index
    ]
    table["of_limit"], is_raw = float("nan"), table["source"] == RAW_PIXELS
    for limit, chosen in ((DECODE_LIMIT, ~is_raw), (MEMCPY_LIMIT, is_raw), (WRITE_LIMIT, is_raw)):
        if limit in table.index:
            table.loc[chosen, "of_limit"] = quiet_summary(runs, limit)["speedup"][chosen]
    first = frame.drop_duplicates("variant").set_index("variant")  # later runs find the workers alive
    table["startup_s"] = first["startup_s"] + first["first_batch_s"]
    for name in ("batch_size", "version", "differs"):
        table[name] = grouped[name].first() if name in runs else float("nan")
    columns = ["kind", "source", "antialias", "decoded_at", "images_per_s", "rate_low", "rate_high", "speedup"]
    columns += ["ci_low", "ci_high", "cpu_s_per_1000", "peak_mem_mb", "startup_s", "of_limit", "batch_size", "version"]
    columns += ["differs", "note"]
    return table[columns].sort_values("images_per_s", ascending=False)


def against_best(frame: pd.DataFrame) -> pd.DataFrame:
    """labkit's rows against the fastest peer of the same class.

    A class is what a loader reads (encoded JPEGs, in files or packed; or raw pixels), how it resamples, and whether it
    decodes at full size. A peer that resamples in another way counts in both classes, to labkit's disadvantage.

    Returns:
        One row for each of labkit's: `class`, `best_peer`, `speedup` over it in paired rounds with `ci_low`, `ci_high`
        (95 %) and `verdict`; all empty if its class has no peer.
    """
    table, runs = peer_table(frame), measured_runs(frame)
    is_raw, rows = table["source"] == RAW_PIXELS, []
    for name, own in table[table["kind"] == "labkit"].iterrows():
        same_resampling = table["antialias"].isna() | (table["antialias"] == own["antialias"])
        same_size = table["decoded_at"] == own["decoded_at"]
        peers = table[(table["kind"] == "peer") & (is_raw == is_raw[name]) & same_resampling & same_size]
        row = {"variant": name, "class": class_of(*own[["source", "antialias", "decoded_at"]]), "best_peer": ""}
        if len(peers):
            best = peers["images_per_s"].idxmax()
            row |= {"best_peer": best, **_compare_two(runs, name, best)[["speedup", "ci_low", "ci_high", "verdict"]]}
        rows.append(row)
    return pd.DataFrame(rows).set_index("variant")


def _compare_two(runs: pd.DataFrame, name: str, baseline: str) -> pd.Series:
    both = runs[runs["variant"].isin([name, baseline])]  # verdicts are for such pairs; most peers do different work
    return quiet_summary(both.assign(has_verdict=True), baseline).loc[name]


def class_of(source: str, antialias: bool | None, decoded_at: str) -> str:
    """Name of a class, such as "JPEG decoded at full size, antialiased"."""
    what = {"": source, "scaled": "JPEG decoded scaled"}.get(decoded_at, f"JPEG decoded at {decoded_at}")
    return f"{what}, {_RESAMPLING[antialias]}"


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


def plot_peers(frame: pd.DataFrame, *, ax: Axes | None = None, title: str = "", **kwargs: Any) -> Axes:
    """How many times as fast as `make_loader` each loader is, by class; or images per second where that was not timed.

    Each round's ratio, or each run's rate, is a small dot; their mean, or median, is the large marker and stands on the
    right. The dashed line of a class is that of decoding whole images, or of copying or writing batches, alone.

    Args:
        frame: Runs as `compare_peers` returns them.
        title: Default: how far the fastest two of the largest class are apart.
        **kwargs: Passed to `Axes.scatter` for the large markers.

    Taught in: notebooks/13_peers.ipynb
    """
    runs, has_base = measured_runs(frame), (frame["variant"] == BEST_DATALOADER).any()
    drawn, unit = ("speedup", "{:.2f}x") if has_base else ("images_per_s", "{:,.0f}")
    table = peer_table(frame, BEST_DATALOADER if has_base else None).sort_values(drawn, ascending=False)
    loaders = table[table["kind"] != "limit"]
    groups = group_by_class(loaders)
    ax = ax or make_axes(1.4 + 0.235 * (len(loaders) + len(groups)))
    rows, limits, y = {}, table[table.index.isin([DECODE_LIMIT, MEMCPY_LIMIT, WRITE_LIMIT])], 0
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
            style = {"s": 42, "zorder": 3, **_STYLES[loader["kind"]], **kwargs}
            ax.scatter(loader[drawn], y, label=_LEGEND.get(loader["kind"], loader["kind"]), **style)
            ax.annotate(unit.format(loader[drawn]), (1.01, y), **place)
            rows[y], y = name, y + 1
    ax.set_yticks(list(rows), list(rows.values()), fontsize=SMALL_PT)
    label = f"times as fast as {BEST_DATALOADER}, in paired rounds" if has_base else "images per second"
    ax.set(xlabel=label, ylabel="", ylim=(y - 0.5, -0.5), xlim=(0, None))
    if not has_base:
        ax.xaxis.set_major_formatter("{x:,.0f}")
    put_legend_below(ax, columns=2)
    write_title(ax, title or _describe_fastest(frame, max(groups.values(), key=len)))
    return ax


def _describe_fastest(frame: pd.DataFrame, members: pd.DataFrame) -> str:
    """The fastest loader of a class, compared with the next."""
    first, *others = members.sort_values("images_per_s", ascending=False).index
    if not others:
        return f"{first}: {members.loc[first, 'images_per_s']:,.0f} images per second"
    row = quiet_summary(frame, others[0]).loc[first]
    if row["ci_low"] <= 1 <= row["ci_high"]:
        return f"No clear difference between {first} and {others[0]}"
    return f"{first} is {format_ratio(row['speedup'])} times as fast as {others[0]}"


def group_by_class(loaders: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Rows of each class, in the order of `loaders`; JPEG before raw pixels."""
    keys = zip(loaders["source"], loaders["antialias"], loaders["decoded_at"], strict=True)
    return dict(list(loaders.groupby([class_of(*key) for key in keys])))


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
    if not {"run", "measure", "peer_class", "decoded_at"} <= set(stored):
        raise ArgumentError(f"{path} is no collection of peers' runs: name another file, which will be created")
    if (stored["measure"] != MEASURE_VERSION).any():
        raise ArgumentError(
            f"{path} holds figures of measure {sorted(set(stored['measure']))}, and this version writes "
            f"{MEASURE_VERSION}: name another file, or run all classes again"
        )
    return stored


def stored_runs() -> pd.DataFrame:
    """The collection that is stored next to notebook 13: every class, on one machine, which it names.

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
