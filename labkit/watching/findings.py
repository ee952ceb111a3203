"""From the record of a training to its report.

In come a `Record` and its `Accounts`; out goes a `WatchReport`: shares and ceiling with its interval, changes, lines of
code, slow samples, notes and tables.
"""

import math
import os
import statistics
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import cycle, islice
from typing import Any, TypeVar

from labkit.measure.intervals import speedup_interval
from labkit.watching.accounts import LEAST_S, Accounts, TimeSpans, costs_of, figures_of, waiting_share
from labkit.watching.advice import Costs, advise, advise_on_loop, slowest_line
from labkit.watching.lines import MAKING, STEP, Line, lines_of, short_path
from labkit.watching.loaders import REPLAY, Epoch
from labkit.watching.record import Record
from labkit.watching.report import WatchReport
from labkit.watching.resources import place_of
from labkit.watching.worker import read_threads

_SPAN_BATCHES = 200  # of the end of the training, in the timeline


def make_report(
    record: Record,
    accounts: Accounts,
    *,
    cpu_share: float | None,
    others_share: float,
    epochs: list[dict[str, float]],
    **known: Any,
) -> WatchReport:
    """What the training waited for.

    Args:
        record: What it noted.
        accounts: Those of its training, with at least one step.
        cpu_share, others_share: Of the cores, since it began.
        epochs: The figures of each finished epoch.
        known: Further fields of `WatchReport`.
    """
    costs = costs_of(accounts, record.device)
    blocks = blocks_of(accounts, costs)
    low, high = ceiling_interval(accounts, costs, blocks)
    batch = accounts.loader.batch
    if batch is not None and accounts.loader.n_pinned:
        batch = replace(batch, pin_s=accounts.loader.pinned_s / accounts.loader.n_pinned)
    import torch  # by now the script has imported it

    samples, slow = slow_samples(record.samples(accounts.loader, settled=True), accounts.loader.name_of)
    busy, loader, n_threads = record.device.busy, accounts.loader, torch.get_num_threads()
    shares = {"compute": costs.step / costs.together, **costs.lost}
    resources = record.resources.read(
        torch_threads=n_threads, num_workers=loader.traits.num_workers or 0,
        worker_threads=read_threads(loader.folder), step_queued=accounts.step_queued,
        making_queued=accounts.making_queued, **place_of(loader.places),
    )  # fmt: skip
    most_workers = resources.most_workers(shares, others_share)
    lines = lines_table(lines_of(record.stacks()))
    slowest = slowest_line(lines)
    advice = advise(costs, loader.traits, accounts.in_line_s, most_workers=most_workers, slowest=slowest)
    if loader.is_sampled:
        advice = [advise_on_loop(costs, loader.kind)]
    return WatchReport(
        shares=shares, ceiling=costs.together / costs.step,
        ceiling_low=low, ceiling_high=high, is_bound=not accounts.of(REPLAY),
        recommendations=advice, costs=costs,
        in_line_s=accounts.in_line_s,
        n_batches=len(accounts.of("training")), tables={
            "loaders": _table(record, accounts), "spans": _spans(accounts), "epochs": epochs,
            "lines": lines, "samples": samples,
        }, slow=slow, cpu_share=cpu_share, others_share=others_share,
        gpu_utilization=statistics.fmean(busy) if busy else None,
        notes=[*_notes(accounts), *_not_covered(record, accounts), *record.failed, *record.hung],
        blocks_s=blocks, settings={**asdict(loader.traits), "torch_threads": n_threads, "device": _device()},
        batch=batch, pace=figures_of(record, accounts),
        resources=resources, is_sampled=loader.is_sampled, **known,
    )  # fmt: skip


# Intervals, from blocks of neighboring batches.

_MOST_BLOCKS = 20
_LEAST_OF_BLOCK = 3  # batches


def blocks_of(accounts: Accounts, costs: Costs) -> dict[str, list[float]]:
    """Seconds per batch, by cause, in blocks of neighboring batches; on average those of `costs`."""
    timings = accounts.of("training")
    waits, receives, steps = (
        _block_means([getattr(timing, name) for timing in timings]) for name in ("wait_s", "hand_over_s", "step_s")
    )
    steps, copies = _scaled(steps, costs.step), _scaled(steps, costs.copy)
    receives = _scaled(receives, costs.hand_over)
    waits = _scaled(waits, costs.fetch + costs.prepare + costs.hand_over)
    making = [max(0.0, wait_s - receive_s) for wait_s, receive_s in zip(waits, receives, strict=True)]
    made = sorted(accounts.made, key=lambda each: each.end_s)
    has_all = len(made) >= len(steps)
    waiting = [*map(waiting_share, in_parts(made, len(steps)))] if has_all else [costs.waiting] * len(steps)
    starts_s = accounts.starts_s[1:] or accounts.starts_s or [0.0]
    starts = [*islice(cycle(starts_s), len(steps))]  # as different as those of the epochs are
    return {
        "compute": steps,
        "fetch": [each_s * share for each_s, share in zip(making, waiting, strict=True)],
        "prepare": [each_s * (1 - share) for each_s, share in zip(making, waiting, strict=True)],
        "copy": copies, "hand-over": receives, "start": _scaled(starts, costs.start),
    }  # fmt: skip


Item = TypeVar("Item")


def in_parts(items: list[Item], n_parts: int) -> Iterator[list[Item]]:
    """Neighboring items together, in parts of about the same length, the longer ones first."""
    each, n_longer = divmod(len(items), n_parts)
    end = 0
    for number in range(n_parts):
        begin, end = end, end + each + (number < n_longer)
        yield items[begin:end]


def _block_means(seconds: list[float]) -> list[float]:
    n_blocks = min(_MOST_BLOCKS, len(seconds) // _LEAST_OF_BLOCK)
    return [*map(statistics.fmean, in_parts(seconds, n_blocks))] if n_blocks >= 2 else seconds


def _scaled(seconds: list[float], mean_s: float) -> list[float]:
    own_s = statistics.fmean(seconds) if seconds else 0.0
    return [mean_s * each / own_s if own_s > 0 else mean_s for each in seconds]


def ceiling_interval(accounts: Accounts, costs: Costs, blocks: dict[str, list[float]]) -> tuple[float, float]:
    """95 % interval of `together` over `step`, from the blocks of a run."""
    replayed = _block_means([timing.step_s for timing in accounts.of(REPLAY)])
    steps, together = ([max(LEAST_S, each) for each in seconds] for seconds in (blocks["compute"], totals(blocks)))
    if replayed:
        low, high = speedup_interval(together, [max(LEAST_S, each) for each in replayed])
    else:
        low, high = speedup_interval(all_s / step_s for all_s, step_s in zip(together, steps, strict=True))
    point = costs.together / costs.step
    return min(low, point), max(high, point)  # bursts are trimmed from the interval, not from the mean


def totals(blocks: dict[str, list[float]]) -> list[float]:
    """Seconds per batch, of all causes, in each block."""
    return [*map(math.fsum, zip(*blocks.values(), strict=True))]


# Lines and samples.

_LEAST_TOLD_S = 0.2  # of what is told, in all: less is a matter of chance, and of little weight
_LEAST_OF_LINES, _MOST_LINES = 0.01, 20


def lines_table(seconds: Mapping[Line, float]) -> list[dict[str, Any]]:
    """The lines of each part that are at least a hundredth of it, the largest first."""
    rows = []
    for part in (MAKING, STEP):
        of_part = {line: each for line, each in seconds.items() if line.part == part}
        total = sum(of_part.values())
        for line, each in sorted(of_part.items(), key=lambda item: -item[1])[:_MOST_LINES]:
            if total >= _LEAST_TOLD_S and each >= _LEAST_OF_LINES * total and line.what:
                rows.append({"part": part, "share": each / total, **line._asdict()})
    return rows


_N_SLOWEST = 20
_SLOW, _OF_SLOWEST = 3.0, 0.1  # a slow sample: so many times the median, and so much of the slowest one
_LEAST_OF_SLOW = 0.1  # of the making, by all slow samples: large files take longer than small ones in any data set


def slow_samples(seconds: list[tuple[Any, float]], name_of: Callable[[Any], str]) -> tuple[list[dict[str, Any]], str]:
    """`samples` and `slow` of a report.

    Args:
        seconds: Index and seconds of each time that a sample was made.
        name_of: The file or key of a sample, by its index.
    """
    if not seconds:
        return [], ""
    by_sample = defaultdict[Any, list[float]](list)  # of several times the shortest counts: a worker's first is slow
    for index, each_s in seconds:
        by_sample[index].append(each_s)
    known = sorted(by_sample.items(), key=lambda item: -min(item[1]))
    usual_s = [min(times) for _, times in known]
    all_s = math.fsum(each_s for _, each_s in seconds) or 1.0
    rows = [
        {
            "sample": (name := name_of(index)),
            "seconds": statistics.fmean(times),
            "share": sum(times) / all_s,
            **_image_facts(name),
        }
        for index, times in known[:_N_SLOWEST]
    ]
    least_s = max(_SLOW * (median_s := statistics.median(usual_s)), _OF_SLOWEST * usual_s[0])
    n_slow = sum(each_s > least_s for each_s in usual_s)
    slow_s, slow = sum(sum(times) for _, times in known[:n_slow]), ""
    share = slow_s / all_s
    if share >= _LEAST_OF_SLOW and slow_s >= _LEAST_TOLD_S:
        told = ", ".join(map(_told_sample, rows[: min(n_slow, 3)]))
        take = "takes" if n_slow == 1 else "take"
        slow = f"{n_slow} of {len(known)} samples {take} {share:.0%} of the time in which samples are made: {told}; "
        slow += f"the median sample takes {1e3 * median_s:.3g} ms."
    return rows, slow


def _image_facts(name: str) -> dict[str, Any]:
    """What the header of an image file says; nothing if it is none that is there, or Pillow is not."""
    if not os.path.isfile(name):  # opening a pipe waits for who writes to it
        return {}
    with suppress(ImportError, OSError, ValueError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an image that Pillow finds too large
        from PIL import Image

        n_bytes = os.path.getsize(name)
        with Image.open(name) as image:
            kind = f"progressive {image.format}" if image.info.get("progressive") else image.format
            return {"bytes": n_bytes, "format": kind, "width": image.width, "height": image.height}
    return {}


def _told_sample(row: dict[str, Any]) -> str:
    told = f"{short_path(row['sample'])} {1e3 * row['seconds']:.3g} ms"
    if "format" not in row:
        return told
    return f"{told} ({row['format']}, {row['width']} x {row['height']}, {row['bytes'] / 1e6:.2g} MB)"


def _device() -> str | None:
    """Where the training computes, as far as torch says: on `cuda` or on the `cpu`; None: maybe on something else."""
    import torch

    if torch.cuda.is_initialized():
        return "cuda"
    has_others = torch.backends.mps.is_available() or torch.xpu.is_available() or "torch_xla" in sys.modules
    return None if has_others else "cpu"


def _idle_workers(accounts: Accounts) -> str:
    """Workers that made no batch, and why; empty if all did, or if some may yet."""
    loader, made = accounts.loader, accounts.made_by
    idle, busy = ([each for each in sorted(made) if each >= 0 and bool(made[each]) is has] for has in (False, True))
    n_ahead = (loader.traits.num_workers or 0) * (loader.traits.prefetch_factor or 1)
    is_over = any(epoch.ended_s is not None or len(epoch.batches) > n_ahead for epoch in loader.epochs)
    if not (idle and busy and is_over):
        return ""
    names = f"Worker {idle[0]}" if len(idle) == 1 else f"Workers {', '.join(map(str, idle[:-1]))} and {idle[-1]}"
    said = f"{names} of {len(idle) + len(busy)} made no batch: num_workers={len(busy)} does the same"
    if loader.traits.n_batches is not None:
        return f"{said}, as an epoch has {loader.traits.n_batches} batch{'es' * (loader.traits.n_batches != 1)}."
    return f"{said}, or give the data set more shards, and each worker its own by torch.utils.data.get_worker_info()."


def _notes(accounts: Accounts) -> list[str]:
    notes = [idle] if (idle := _idle_workers(accounts)) else []
    if accounts.loader.is_sampled:
        notes.append(
            f"What makes the batches of {accounts.loader.kind} is not known to labkit: its waiting is from samples of "
            "where the code stood, every 5 ms, and each call of backward() counts as a step."
        )
    if not accounts.loader.trains and not accounts.of(REPLAY):
        notes.append(
            "Neither backward() nor an optimizer of torch ran between batches: perhaps this loop trains nothing."
        )
    threads = {epoch.thread for epoch in accounts.loader.epochs}
    if len(threads) > 1:
        notes.append("A thread of the script reads ahead of the training, which may hide part of these waits.")
    return notes


def _not_covered(record: Record, accounts: Accounts) -> Iterator[str]:
    """What the figures leave out of the training, as far as it was seen."""
    main = accounts.loader
    spans = TimeSpans(epoch.span for epoch in main.epochs if epoch.batches)
    others = [
        each for each in record.training if each is not main and each.n_batches
        and not any(
            spans.overlaps(epoch.began_s, epoch.batches[-1].received_s) for epoch in each.epochs if epoch.batches
        )
    ]  # fmt: skip
    if others and record.main is None:
        n_all = main.n_batches + sum(each.n_batches for each in others)
        yield (
            f"These figures are of {main.n_batches} of {n_all} batches of the training: those of {main.kind} "
            f"{main.number}, one of {len(others) + 1} loaders that it takes one after the other."
        )
    for each in record.loaders:
        if each.has_gradients and each not in (*record.training, main) and each.n_batches > main.n_batches:
            yield (
                f"{each.kind} {each.number} gave {each.n_batches} batches, and the loader of these figures "
                f"{main.n_batches}, but neither backward() nor an optimizer of torch ran between "
                "them: the training may be there."
            )


def _table(record: Record, accounts: Accounts) -> list[dict[str, Any]]:
    """Of each loader what it is, how long a batch was waited for, but for the first of epochs, and how one was made."""
    rows = []
    for loader in (each for each in record.loaders if each.n_batches):
        is_main, is_training = loader is accounts.loader, loader.trains and loader in record.training
        made = accounts.made if is_main else [made for epoch in loader.epochs for made in epoch.made_here]
        batches = [batch for epoch in loader.epochs for batch in epoch.batches[1:] or epoch.batches]
        wall_s, collate_s = _mean(each.end_s - each.start_s for each in made), _mean(each.collate_s for each in made)
        storage_s = max(0.0, wall_s - _mean(each.busy_s for each in made))
        rows.append({
            "loader": f"{loader.kind} {loader.number}",
            "role": "training" if is_main else "training, too" if is_training else "other",
            "num_workers": loader.traits.num_workers, "n_batches": loader.n_batches,
            "wait_ms": 1e3 * _mean(each.received_s - each.asked_s for each in batches),
            "ready": accounts.ready if is_main else _mean(each.ready > 0 for each in batches if each.ready is not None),
            "storage_ms": 1e3 * storage_s if made else math.nan,
            "getitem_ms": 1e3 * max(0.0, wall_s - collate_s - storage_s) if made else math.nan,
            "collate_ms": 1e3 * collate_s,
        })  # fmt: skip
    return rows


def _mean(values: Iterable[float]) -> float:
    known = [*values]
    return statistics.fmean(known) if known else math.nan


def _spans(accounts: Accounts) -> list[dict[str, Any]]:
    """The last batches, as the host and those that made them saw them."""
    epochs = accounts.loader.epochs
    kept = [(epoch, number) for epoch in epochs for number in range(len(epoch.batches))][-_SPAN_BATCHES:]
    began_s = kept[0][0].batches[kept[0][1]].asked_s
    rows: list[dict[str, Any]] = [
        {"lane": f"worker {worker}", "kind": "load", "start_s": made.start_s, "end_s": made.end_s, "batch": -1}
        for worker, of_worker in sorted(accounts.made_by.items())
        for made in of_worker if worker >= 0 and made.start_s >= began_s
    ]  # fmt: skip
    rows += [row for count, (epoch, number) in enumerate(kept) for row in _host_spans(epoch, number, count)]
    return [{**row, "start_s": max(0.0, row["start_s"] - began_s), "end_s": row["end_s"] - began_s} for row in rows]


def _host_spans(epoch: Epoch, number: int, count: int) -> Iterator[dict[str, Any]]:
    batch = epoch.batches[number]
    following = epoch.batches[number + 1].asked_s if number + 1 < len(epoch.batches) else epoch.ended_s
    kind = "load" if batch.worker == -1 and epoch.made_here else "wait"
    yield {"lane": "host", "kind": kind, "start_s": batch.asked_s, "end_s": batch.received_s, "batch": count}
    if following is not None:
        yield {"lane": "host", "kind": "step", "start_s": batch.received_s, "end_s": following, "batch": count}
