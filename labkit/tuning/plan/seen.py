"""What `diagnose` and `watch` saw of a training, as inputs of a plan."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from labkit.core import require_int
from labkit.tuning.plan.estimate import Estimate


def inputs_of(seen: Any, batch_size: Any = None) -> dict[str, Estimate]:
    """Demand, the step's cores and the loader's core time of an image, as far as they were seen.

    Args:
        seen: A `Diagnosis`, a `WatchReport`, or the path of what `labkit watch --json` wrote.
        batch_size: Images of a batch, which a watch does not know.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is not from `labkit watch`, or the batch size is missing.
    """
    if isinstance(seen, str | os.PathLike):
        return _of_watch(_read(seen), batch_size)
    if hasattr(seen, "to_dict"):
        return _of_watch(seen.to_dict(), batch_size)
    return _of_diagnosis(seen)


def is_seen(given: Any) -> bool:
    """Whether it is something that `inputs_of` takes."""
    return isinstance(given, str | os.PathLike) or hasattr(given, "costs")


def _read(path: str | os.PathLike) -> dict[str, Any]:
    try:
        found = json.loads(Path(path).read_bytes())
        return {"costs_s": dict(found["costs_s"]), "ceiling_is_bound": bool(found["ceiling_is_bound"])}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a report of `labkit watch --json`: {error}") from error


def _of_diagnosis(found: Any) -> dict[str, Estimate]:
    steps = found.frame.loc[found.frame["variant"] == "step", "images_per_s"]
    n_images = float(found.frame["batch_size"].iloc[0])
    source = f"lk.diagnose, {len(steps)} rounds on {found.frame['env_id'].iloc[0]}"
    rate = float(steps.median())
    if not rate > 0:
        raise ValueError("the diagnosis counted no images in its batches: pass count= to lk.diagnose")
    demand = Estimate(rate, float(steps.min()), float(steps.max()), f"{source}: the step alone", "measured here")
    costs = {name: getattr(found.costs, name) for name in ("step", "step_cpu", "making", "waiting")}
    return {"images_per_s_per_gpu": demand, **_of_costs(costs, n_images, source)}


def _of_watch(found: Mapping[str, Any], batch_size: Any) -> dict[str, Estimate]:
    if batch_size is None:
        raise ValueError("batch_size is missing: a watch counts batches, so enter the images of one")
    n_images, source, costs = require_int("batch_size", batch_size), "labkit watch", found["costs_s"]
    why = ", the step as it was seen, which busy cores slow down" if found["ceiling_is_bound"] else ", steps repeated"
    demand = Estimate(n_images / costs["step"], source=source + why, kind="measured here")
    own = {"images_per_s_per_gpu": demand, **_of_costs(costs, n_images, source)}
    if "cpu_ms_per_image" in own:  # all the training ran beside it
        own["slowdown"] = Estimate(1.0, source="labkit watch saw the loader beside the training", kind="measured here")
    return own


def _of_costs(costs: Mapping[str, Any], n_images: float, source: str) -> dict[str, Estimate]:
    found = {}
    if (step_cpu := costs.get("step_cpu")) and step_cpu > 0:
        found["step_cores_per_gpu"] = Estimate(
            step_cpu / costs["step"], source=f"{source}: core time of the step", kind="measured here"
        )
    if (making := costs.get("making")) and (cpu_s := making * (1 - costs["waiting"])) > 0:
        ms = 1e3 * cpu_s / n_images
        found["cpu_ms_per_image"] = Estimate(
            ms, source=f"{source}: making a batch, without waiting", kind="measured here"
        )
    return found
