"""Summaries of compare_peers' runs: the table, and labkit's rows against the best peer of their class."""

import pandas as pd

from labkit.measure import measured_runs, quiet_summary, speedup_interval
from labkit.peers.adapters import DECODE_LIMIT, MEMCPY_LIMIT, WRITE_LIMIT
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
    table["antialias"] = _read_antialias(runs)
    table[["rate_low", "rate_high"]] = [
        speedup_interval(grouped.get_group(name)["images_per_s"].to_numpy()) for name in table.index
    ]
    table["of_limit"] = _limit_shares(runs, table)
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
    own = table[table["kind"] == "labkit"]
    return pd.DataFrame([_compare_with_best(runs, table, name) for name in own.index]).set_index("variant")


def class_of(source: str, antialias: bool | None) -> str:
    """Name of a class, such as "JPEG, antialiased"."""
    return f"{source if source == RAW_PIXELS else 'JPEG'}, {_RESAMPLING[antialias]}"


def left_out(frame: pd.DataFrame) -> pd.DataFrame:
    """Peers that did not run: `state` is `missing`, with the install command, or `broke`, with the error."""
    return pd.DataFrame(frame.attrs.get("left_out", []), columns=["name", "state", "why"]).set_index("name")


def _read_antialias(runs: pd.DataFrame) -> pd.Series:
    """The flag of each loader as True, False or None, which a CSV stores as text and NaN."""
    first = runs.drop_duplicates("variant").set_index("variant")["antialias"]
    return first.map(lambda flag: None if pd.isna(flag) else str(flag) == "True").astype(object)


def _limit_shares(runs: pd.DataFrame, table: pd.DataFrame) -> pd.Series:
    is_raw, shares = table["source"] == RAW_PIXELS, pd.Series(float("nan"), index=table.index)
    limits = ((DECODE_LIMIT, ~is_raw), (MEMCPY_LIMIT, is_raw), (WRITE_LIMIT, is_raw))
    for limit, names in ((limit, table.index[chosen]) for limit, chosen in limits):
        if limit in table.index:
            shares[names] = [_compare_two(runs, name, limit)["speedup"] for name in names]
    return shares


def _compare_with_best(runs: pd.DataFrame, table: pd.DataFrame, name: str) -> dict:
    own = table.loc[name]
    same_source = (table["source"] == RAW_PIXELS) == (own["source"] == RAW_PIXELS)
    same_resampling = table["antialias"].isna() | (table["antialias"] == own["antialias"])
    peers = table[(table["kind"] == "peer") & same_source & same_resampling]
    row = {"variant": name, "class": class_of(own["source"], own["antialias"]), "best_peer": ""}
    if peers.empty:
        return row
    best = peers["images_per_s"].idxmax()
    comparison = _compare_two(runs, name, best)[["speedup", "ci_low", "ci_high", "verdict"]]
    return {**row, "best_peer": best, **comparison}


def _compare_two(runs: pd.DataFrame, name: str, baseline: str) -> pd.Series:
    both = runs[runs["variant"].isin([name, baseline])]  # verdicts are for such pairs; most peers do different work
    return quiet_summary(both.assign(has_verdict=True), baseline).loc[name]
