"""plan(): what a training on many GPUs asks of cores, storage and network, and what limits it."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from labkit.core import require_choice, require_positive
from labkit.tuning.plan.costs import DATA, LoaderCosts
from labkit.tuning.plan.cures import REQUEST_MB
from labkit.tuning.plan.estimate import Estimate
from labkit.tuning.plan.inputs import INPUTS, check_inputs
from labkit.tuning.plan.published import (
    STORAGES,
    Storage,
    cores_of,
    demand_of,
    find_training,
    pcie,
    pcie_of,
    rented_cores,
)
from labkit.tuning.plan.result import Plan
from labkit.tuning.plan.seen import inputs_of, is_seen
from labkit.tuning.plan.setup import Setup

DTYPES = {"uint8": 1, "float16": 2, "bfloat16": 2, "float32": 4}


def plan(
    demand: Any = None,
    *,
    gpu: str = "",
    model: str = "ResNet-50",
    n_gpus: int = 1,
    n_nodes: int = 1,
    costs: LoaderCosts | str | os.PathLike | None = None,
    data: str = "photos",
    storage: str | Storage = "nvme",
    dtype: str = "uint8",
    vcpus_per_node: float | None = None,
    **inputs: float | Sequence[float] | Estimate | None,
) -> Plan:
    """Predict what a training on many GPUs asks for, which resource limits it, and what the cheapest cure brings.

    One number is exact; (low, high) and (low, value, high) are 95 % intervals; an `Estimate` also has a source. Random
    draws carry them through all formulas, each input apart. Nothing that is computed was measured. Needs no torch.

    Args:
        demand: Images/s of one GPU: a number, or what was measured: a `Diagnosis`, a `WatchReport` or the path of what
            `labkit watch --json` wrote (both with `batch_size`). None: what is published for `gpu` and `model`.
        gpu, model: As `lk.PUBLISHED_TRAINING` names them, such as "h100"; also gives the bus, and rented cores.
        n_gpus, n_nodes: GPUs in all, and the machines that share them evenly.
        costs: What `lk.loader_costs` measured, or the path where it was saved.
        data: What is stored: "photos", "photos at 256" or "pixels at 256", for `costs`.
        storage: "nvme", "s3", "memory", or a `Storage`.
        dtype: Of the values that are sent to a GPU: uint8, float16, bfloat16 or float32.
        vcpus_per_node: In place of `cores_per_node`, for rented machines.
        **inputs: Any of `labkit.tuning.plan.INPUTS`, such as `cores_per_node`, `cpu_ms_per_image`, `latency_ms`.

    Raises: FileNotFoundError, ValueError (a wrong or unknown argument, or one is missing that has no default).
    Taught in: notebooks/15_at_scale.ipynb
    """
    known = _known_costs(costs)
    entered = check_inputs({"n_gpus": n_gpus, "n_nodes": n_nodes, **inputs})
    _check_nodes(n_gpus, n_nodes)
    found = _defaults(require_choice("dtype", dtype, DTYPES)) | _of_gpu(gpu, model, n_gpus / n_nodes)
    found |= _of_demand(demand, inputs.get("batch_size")) | dict(
        known.by_data.get(require_choice("data", data, DATA), {})
    )
    if pixels := known.by_data.get("pixels at 256"):
        found["pixel_kb_per_image"] = pixels["kb_per_image"]
    found |= _of_vcpus(vcpus_per_node)
    place = _storage(storage)
    found |= {**place.rates, **_of_shards(entered), **entered}
    _check_complete(found)
    setup = Setup(found, place.name, not place.is_local, data, known.by_data)
    return Plan(setup, _title(gpu, model, n_gpus, n_nodes), known.notes)


def _defaults(dtype: str) -> dict[str, Estimate]:
    found = {name: each.default for name, each in INPUTS.items() if each.default is not None}
    return {**found, "bytes_per_value": Estimate(DTYPES[dtype], source=f"dtype {dtype}")}


def _of_vcpus(vcpus: Any) -> dict[str, Estimate]:
    return {} if vcpus is None else {"cores_per_node": cores_of(require_positive("vcpus_per_node", vcpus))}


def _check_nodes(n_gpus: int, n_nodes: int) -> None:
    if n_gpus % n_nodes:
        raise ValueError(f"n_gpus must be a multiple of n_nodes, got {n_gpus} GPUs on {n_nodes} nodes")


def _known_costs(costs: Any) -> LoaderCosts:
    if costs is None:
        return LoaderCosts({})
    if isinstance(costs, LoaderCosts):
        return costs
    if isinstance(costs, str | os.PathLike):
        return LoaderCosts.load_json(costs)
    raise ValueError(f"costs must be what lk.loader_costs gives, or its file, got a {type(costs).__name__}")


def _of_gpu(gpu: str, model: str, gpus_per_node: float) -> dict[str, Estimate]:
    """Rate, bus and rented cores, as published."""
    if not gpu:
        return {"pcie_gb_per_s": pcie()}
    key, _ = find_training(gpu, model)
    cores = rented_cores(key, gpus_per_node)
    own = {"images_per_s_per_gpu": demand_of(key), "pcie_gb_per_s": pcie_of(key)}
    return own if cores is None else {**own, "cores_per_node": cores}


def _of_demand(demand: Any, batch_size: Any) -> dict[str, Estimate]:
    if demand is None:
        return {}
    if is_seen(demand):
        return inputs_of(demand, batch_size)
    return check_inputs({"images_per_s_per_gpu": demand})


def _storage(storage: Any) -> Storage:
    if isinstance(storage, Storage):
        return Storage(storage.name, check_inputs(storage.rates), storage.is_local)
    return STORAGES[require_choice("storage", storage, STORAGES)]


def _of_shards(entered: Mapping[str, Estimate]) -> dict[str, Estimate]:
    """Shards are read in ranges, of which none is longer than a shard."""
    if "shard_mb" not in entered or "request_mb" in entered:
        return {}
    whole = entered["shard_mb"]
    return {"request_mb": whole if whole.value < REQUEST_MB.value else REQUEST_MB}


_MISSING = {
    "images_per_s_per_gpu": "enter demand, the images/s of a GPU, or gpu, one of lk.PUBLISHED_TRAINING",
    "cores_per_node": "enter cores_per_node, or vcpus_per_node of a rented machine",
    "cpu_ms_per_image": "enter it, or measure it: costs=lk.loader_costs(FOLDER), or demand=lk.diagnose(loader, step)",
}


def _check_complete(inputs: Mapping[str, Estimate]) -> None:
    for name, remedy in _MISSING.items():
        if name not in inputs:
            raise ValueError(f"the {INPUTS[name].label} is not known ({name}): {remedy}")


def _title(gpu: str, model: str, n_gpus: int, n_nodes: int) -> str:
    what = find_training(gpu, model)[0] if gpu else "own rate"
    gpus = f"{n_gpus} GPU{'s' if n_gpus > 1 else ''}"
    return f"{gpus} on {n_nodes} node{'s' if n_nodes > 1 else ''}, {what}"
