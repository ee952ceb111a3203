"""What an epoch of some length takes, from the parts of shorter or longer runs."""

import pandas as pd

from labkit.core import require_int
from labkit.measure.frames import measured_runs


def epoch_time(frame: pd.DataFrame, n_batches: int) -> pd.DataFrame:
    """Seconds of an epoch of `n_batches` batches, start and end of the workers included.

    Args:
        frame: Runs, as `compare` returns them.
        n_batches: Batches of the epoch: of your own data set, not of the run that was timed.

    Returns:
        One row per variant, in order of appearance, medians over its runs: `startup_s`, `first_batch_s`, `batches_s`
        (the wait for all the other batches), `shutdown_s`, `epoch_s` (their sum) with `epoch_s_low` and `epoch_s_high`
        (its quartiles), and `overhead`: the share of the epoch that is not spent at the steady rate.

    Raises:
        ValueError: `n_batches` is below 1, or the frame has no runs of `compare`.

    Taught in: notebooks/03_persistent_workers.ipynb
    """
    require_int("n_batches", n_batches)
    runs = measured_runs(frame).dropna(subset=["startup_s", "first_batch_s", "steady_s", "shutdown_s"])
    if runs.empty:
        raise ValueError("no run of the frame has a start-up and an end: pass a frame from labkit.compare")
    n_more = n_batches - 1
    n_settling = runs["n_settle_batches"].clip(upper=n_more)
    settling_s = runs["settle_s"] * (n_settling / runs["n_settle_batches"].where(runs["n_settle_batches"] > 0, 1))
    # A run of one batch has no other to tell how long the next takes.
    batch_s = (runs["steady_s"] / runs["n_steady_batches"]).where(runs["n_steady_batches"] > 0, runs["first_batch_s"])
    parts = runs[["variant", "startup_s", "first_batch_s"]].assign(
        batches_s=settling_s + (n_more - n_settling) * batch_s, shutdown_s=runs["shutdown_s"]
    )
    parts["epoch_s"] = parts.drop(columns="variant").sum(axis=1)
    parts["overhead"] = 1 - n_batches * batch_s / parts["epoch_s"]
    table = parts.groupby("variant", sort=False)
    found = table.median()
    low, high = (table["epoch_s"].quantile(q) for q in (0.25, 0.75))
    return found.assign(epoch_s_low=low, epoch_s_high=high)[
        ["startup_s", "first_batch_s", "batches_s", "shutdown_s", "epoch_s", "epoch_s_low", "epoch_s_high", "overhead"]
    ]
