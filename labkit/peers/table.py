"""What the runs of compare_peers say: the table, and labkit's rows against the best peer of their class."""

import pandas as pd

from labkit.measure import quiet_summary, speedup_interval
from labkit.peers.adapters import DECODE_LIMIT, MEMCPY_LIMIT
from labkit.peers.peer import RAW_PIXELS

CLASSES = {True: "antialiased", False: "not antialiased", None: "between"}


def peer_table(frame: pd.DataFrame) -> pd.DataFrame:
    """One row a loader, all from the same runs; the fastest first.

    Args:
        frame: Runs, as `compare_peers` gives them, or as they were read back from its CSV.

    Returns:
        Index `variant`; columns `kind`, `source`, `antialias`; `images_per_s` with the 95 % interval of its mean
        (`rate_low`, `rate_high`); `speedup` over the baseline in paired rounds (`ci_low`, `ci_high`);
        `cpu_s_per_1000` images; `peak_mem_mb`; and `of_limit`, its share of the limit of its source (decoding alone,
        or copying alone), NaN where that is not in the frame; and `note`, which says what is unstable.

    Taught in: notebooks/13_peers.ipynb
    """
    summary = quiet_summary(frame)  # `note` says what the warning would
    runs = _counted(frame)
    table = runs.groupby("variant", sort=False)[["kind", "source", "antialias"]].first().join(summary)
    table["antialias"] = _antialias(runs)
    table[["rate_low", "rate_high"]] = [_rate_interval(runs, name) for name in table.index]
    table["of_limit"] = _shares(runs, table)
    columns = ["kind", "source", "antialias", "images_per_s", "rate_low", "rate_high", "speedup", "ci_low", "ci_high"]
    return table[[*columns, "cpu_s_per_1000", "peak_mem_mb", "of_limit", "note"]].sort_values(
        "images_per_s", ascending=False
    )


def against_best(frame: pd.DataFrame) -> pd.DataFrame:
    """labkit's rows against the fastest peer of the same class.

    A class is what is read (encoded JPEGs, in files or packed; or raw pixels) and how it is resampled. A peer whose
    resampling is neither counts in both classes, to our disadvantage.

    Returns:
        One row for each of labkit's: `class`, `best_peer`, `speedup` over it in paired rounds with `ci_low`, `ci_high`
        (95 %) and `verdict`; without a peer in its class, empty.

    Taught in: notebooks/13_peers.ipynb
    """
    table, runs = peer_table(frame), _counted(frame)
    own = table[table["kind"] == "labkit"]
    return pd.DataFrame([_against(runs, table, name) for name in own.index]).set_index("variant")


def class_of(source: str, antialias: bool | None) -> str:
    """Name of a class, as in "JPEG, antialiased"."""
    return f"{source if source == RAW_PIXELS else 'JPEG'}, {CLASSES[antialias]}"


def left_out(frame: pd.DataFrame) -> pd.DataFrame:
    """Peers that did not run: `state` is `missing`, with the command that installs it, or `broke`, with the error."""
    return pd.DataFrame(frame.attrs.get("left_out", []), columns=["name", "state", "why"]).set_index("name")


def _counted(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[~frame["is_warmup"].astype(bool)]


def _antialias(runs: pd.DataFrame) -> pd.Series:
    """The flag of each loader as True, False or None: a CSV gives None back as NaN."""
    first = runs.drop_duplicates("variant").set_index("variant")["antialias"]
    return first.map(lambda flag: None if pd.isna(flag) else str(flag) == "True").astype(object)


def _rate_interval(runs: pd.DataFrame, name: str) -> tuple[float, float]:
    return speedup_interval(runs.loc[runs["variant"] == name, "images_per_s"].to_numpy())


def _shares(runs: pd.DataFrame, table: pd.DataFrame) -> pd.Series:
    shares = pd.Series(float("nan"), index=table.index)
    for limit in (DECODE_LIMIT, MEMCPY_LIMIT):
        if limit in table.index:
            raw = table["source"] == RAW_PIXELS
            mine = raw if table.loc[limit, "source"] == RAW_PIXELS else ~raw
            shares[mine] = [_between(runs, name, limit)["speedup"] for name in table.index[mine]]
    return shares


def _against(runs: pd.DataFrame, table: pd.DataFrame, name: str) -> dict:
    own = table.loc[name]
    raw = own["source"] == RAW_PIXELS
    peers = table[(table["kind"] == "peer") & ((table["source"] == RAW_PIXELS) == raw)]
    peers = peers[[flag is None or flag == own["antialias"] for flag in peers["antialias"]]]
    found = {"variant": name, "class": class_of(own["source"], own["antialias"]), "best_peer": ""}
    if peers.empty:
        return found
    best = peers["images_per_s"].idxmax()
    said = _between(runs, name, best)
    return {**found, "best_peer": best, **said[["speedup", "ci_low", "ci_high", "verdict"]]}


def _between(runs: pd.DataFrame, name: str, base: str) -> pd.Series:
    """What `summarize` says of two alone."""
    return quiet_summary(runs[runs["variant"].isin([name, base])], base).loc[name]
