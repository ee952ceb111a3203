"""A plan as a form that runs in the page: from the disk, without a network or a server.

Its formulas are those of `labkit.tuning.plan`, translated; its labels, units, defaults and published figures too.
"""

import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jinja2

from labkit.lab.planning import NUMBERS
from labkit.lab.site.javascript import Translation
from labkit.tuning.plan import (
    DATA,
    DTYPES,
    GROUPS,
    INPUTS,
    N_DRAWS,
    PUBLISHED_TRAINING,
    QUANTILE,
    STORAGES,
    deviates,
    page_row,
    plan,
)

FOLDER = Path(__file__).parent
_OWN_STORAGES = {"own, remote": "own, over the network", "own, local": "own, one in each node"}
_NO_GPU = "another: enter its images/s below"
_BY_HAND = (  # in plan_estimates.js
    "Estimate", "as_estimate", "require_int", "require_positive", "is_seen", "inputs_of", "_known_costs", "compute",
    "of_draws", "LoaderCosts",
)  # fmt: skip
_OMITTED = {
    "Plan": ("frame", "value", "to_dict", "save_json", "__repr__", "_repr_html_"),
    "PublishedTraining": ("step_s",),
}

_EXPORTED = (
    "planned", "loadCosts", "Storage", "page_row", "GROUPS", "INPUTS", "format_number", "PUBLISHED_TRAINING", "TABLES",
)  # fmt: skip

# Heading -> the fields that are always seen, and those that are folded away.
FIELDS = {
    "The training": (
        ("gpu", "demand", "n_gpus", "n_nodes", "n_images"),
        ("batch_size", "batches_ahead", "crop_size", "dtype", "step_cores_per_gpu"),
    ),
    "Loading an image": (
        ("costs", "data", "cpu_ms_per_image", "gil_us_per_image", "kb_per_image"),
        ("slowdown", "processes_per_gpu", "process_gb", "pixel_kb_per_image"),
    ),
    "A node": (("cores_per_node", "vcpus_per_node", "network_gbit_per_node"), ("pcie_gb_per_s",)),
    "The storage": (
        (
            "storage", "latency_ms", "mb_per_s_per_request", "requests_per_s", "storage_mb_per_s",
            "requests_in_flight_per_gpu", "request_mb",
        ),
        ("shard_mb", "n_prefixes"),
    ),
    "Prices": ((), ("price_per_gpu_hour", "price_per_1000_requests")),
}  # fmt: skip

# What a page starts with: an example, which says that it is one.
EXAMPLE = {"gpu": "ResNet-50, H100 SXM", "n_gpus": "8", "n_nodes": "1", "cpu_ms_per_image": "1:4", "storage": "s3"}

_CHOICES = {
    "gpu": ("GPU and model, as published", {**{key: key for key in PUBLISHED_TRAINING}, "": _NO_GPU}),
    "data": ("what is stored, for the costs", {each: each for each in DATA}),
    "dtype": ("values sent to a GPU", {each: each for each in DTYPES}),
    "storage": ("where the images are", {**{key: each.name for key, each in STORAGES.items()}, **_OWN_STORAGES}),
}
_LABELS = {
    "demand": "images/s of a GPU, if you know your own", "vcpus_per_node": "or vCPUs of a node",
    "costs": "your measured costs: the file of LoaderCosts.save_json",
}  # fmt: skip
_HELP = {"cpu_ms_per_image": "the example is no measurement: lk.loader_costs measures yours"}
_UNKNOWN = {
    "vcpus_per_node": "", "requests_in_flight_per_gpu": "not given: a thread a core reads",
    "request_mb": "not given: an image a request, or 8 to 16 MB of a shard", "shard_mb": "not given: no shards",
}  # fmt: skip


@dataclass(frozen=True)
class Field:
    """label: With its unit.

    options: Value -> text, of a choice.
    value: What it starts with.
    help: A sentence below it.
    unknown: Another one, if it is empty and nothing is known in its place.
    """

    name: str
    label: str
    options: dict[str, str]
    value: str
    help: str
    unknown: str


def plan_form_html() -> str:
    """The form with its results, script and style: a fragment of HTML for any page; its ids begin with `plan-`.

    Raises:
        Untranslatable: a formula of the plan uses something that `labkit.lab.site.javascript` does not know.
    """
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    page = environment.from_string(_read("plan_form.html"))
    groups = {heading: [list(map(_field, names)) for names in both] for heading, both in FIELDS.items()}
    parts = map(_read, ("plan_chart.js", "plan_tables.js", "plan_form.js"))
    script = "\n".join(['"use strict";', "{", plan_script(), *parts, "}"])
    return page.render(groups=groups, numbers=NUMBERS, style=_read("plan_form.css"), script=_safe(script))


def plan_script() -> str:
    """JavaScript that defines `labkitPlan`: `planned(arguments)` is `plan(**arguments).to_dict()`."""
    program = Translation(by_hand=_BY_HAND, as_data=("Line",), omitted=_OMITTED, methods=("draw", "times"))
    for name, value in {"plan": plan, "page_row": page_row, "GROUPS": GROUPS, "INPUTS": INPUTS}.items():
        program.add(name, value)
    return "\n".join(
        [
            "const labkitPlan = (() => {",
            f"const TABLES = {json.dumps(_tables())};",
            f"const py = (() => {{\n{_read('plan_numbers.js')}\nreturn py;\n}})();",
            _read("plan_estimates.js"),
            program.text(),
            f"return {{ {', '.join(_EXPORTED)} }};",
            "})();",
        ]
    )


def _tables() -> dict[str, object]:
    parameters = {
        name: each.default
        for name, each in inspect.signature(plan).parameters.items()
        if each.kind is not each.VAR_KEYWORD
    }
    above = [round(float(each), 7) for each in deviates()[N_DRAWS // 2 :]]
    return {
        "n_draws": N_DRAWS, "quantile": QUANTILE, "deviates": above, "data": DATA,
        "parameters": list(parameters), "defaults": parameters, "numbers": NUMBERS,
    }  # fmt: skip


def _field(name: str) -> Field:
    label, options = _CHOICES.get(name) or (_LABELS.get(name) or _label(name), {})
    unknown = _UNKNOWN.get(name, "not known: left out")
    return Field(name, label, options, EXAMPLE.get(name, ""), _HELP.get(name, ""), unknown)


def _label(name: str) -> str:
    label, unit = INPUTS[name].label, INPUTS[name].unit
    return f"{label} ({unit})" if unit else label


def field_names() -> Iterator[str]:
    """All fields, in the order of the page."""
    for seen, folded in FIELDS.values():
        yield from (*seen, *folded)


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _safe(script: str) -> str:
    """Nothing in it ends the element that holds it."""
    return script.replace("</", "<\\/").replace("<!--", "<\\!--")
