"""`python -m labkit plan`: the options, and a plan as tables."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from labkit.lab.scripts import one_line_errors

NUMBERS = "a number, LOW:HIGH or LOW:VALUE:HIGH"
_Text = Annotated[str, typer.Option(help=NUMBERS)]


def _numbers(name: str, text: str) -> float | Sequence[float] | None:
    """What stands after an option."""
    if not text:
        return None
    try:
        found = [float(part) for part in text.split(":")]
    except ValueError:
        found = []
    if not 1 <= len(found) <= 3:
        raise ValueError(f"{name} must be {NUMBERS}, got {text!r}")
    return found[0] if len(found) == 1 else found


def plan(
    gpu: Annotated[str, typer.Option(help="Published rate, bus and cores of a GPU, such as h100.")] = "",
    model: Annotated[str, typer.Option(help="The model of the published rate.")] = "ResNet-50",
    images_per_s: Annotated[
        str, typer.Option(help=f"Your own images/s of a GPU: {NUMBERS}, as all options here.")
    ] = "",
    watched: Annotated[str, typer.Option(help="In its place, what `labkit watch --json` wrote.")] = "",
    batch_size: Annotated[int | None, typer.Option(help="Images of a batch, one GPU.")] = None,
    n_gpus: Annotated[int, typer.Option(help="GPUs in all.")] = 1,
    n_nodes: Annotated[int, typer.Option(help="Machines that share them.")] = 1,
    cores: Annotated[str, typer.Option(help="Cores of a node.")] = "",
    vcpus: Annotated[float | None, typer.Option(help="In their place, its vCPUs.")] = None,
    measure: Annotated[str, typer.Option(help="Images (folder, tar, URL) to measure here what one costs.")] = "",
    costs: Annotated[str, typer.Option(help="File to keep it in with --measure, and else to read it from.")] = "",
    data: Annotated[str, typer.Option(help="What is stored: photos, 'photos at 256', 'pixels at 256'.")] = "photos",
    cpu_ms: Annotated[str, typer.Option(help="Core time of an image, ms.")] = "",
    gil_us: Annotated[str, typer.Option(help="Time of an image under Python's lock, us.")] = "",
    kb: Annotated[str, typer.Option(help="An image in storage, KB.")] = "",
    n_images: Annotated[int | None, typer.Option(help="Images of an epoch.")] = None,
    storage: Annotated[str, typer.Option(help="nvme, s3 or memory; the options below change it.")] = "nvme",
    given: Annotated[
        list[str] | None, typer.Option("--set", help="Any other input: NAME=NUMBER, such as latency_ms=5:20.")
    ] = None,
    json: Annotated[str, typer.Option(help="File for the plan.")] = "",
) -> None:
    """Predict the cores, storage and network that many GPUs ask for, what limits them, and the cheapest cure."""
    from labkit.tuning.plan import LoaderCosts, loader_costs, plan as make_plan

    with one_line_errors("labkit", OSError, ValueError):
        inputs = {
            "cores_per_node": _numbers("--cores", cores), "cpu_ms_per_image": _numbers("--cpu-ms", cpu_ms),
            "gil_us_per_image": _numbers("--gil-us", gil_us), "kb_per_image": _numbers("--kb", kb),
            **dict(map(_pair, given or [])),
        }  # fmt: skip
        found: LoaderCosts | None = None
        if measure:
            found = loader_costs(measure)
            if costs:
                typer.echo(f"wrote {found.save_json(costs)}")
        made = make_plan(
            watched or _numbers("--images-per-s", images_per_s), gpu=gpu, model=model, n_gpus=n_gpus, n_nodes=n_nodes,
            costs=found or costs or None, data=data, storage=storage, vcpus_per_node=vcpus, batch_size=batch_size,
            n_images=n_images, **inputs,
        )  # fmt: skip
        _print(made)
        if json:
            typer.echo(f"wrote {made.save_json(Path(json))}")


def _pair(text: str) -> tuple[str, Any]:
    name, equals, numbers = text.partition("=")
    if not equals:
        raise ValueError(f"--set must be NAME=NUMBER, got {text!r}")
    number = _numbers(f"--set {name}", numbers)
    return name, int(number) if isinstance(number, float) and number.is_integer() else number


def _print(made: Any) -> None:
    """The page in words, and each group of lines as a table."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from labkit.tuning.plan import Page

    page, console = Page.of(made), Console(soft_wrap=False)
    console.print(f"[bold]{escape(page.title)}[/bold]")
    for sentence in [*page.sentences, *page.notes]:
        console.print(escape(sentence), highlight=False)
    for heading, rows in page.sections.items():
        table = Table(title=heading, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("")
        table.add_column("median", justify="right")
        for name in ("95 % interval", "from", "sources"):
            table.add_column(name)
        for row in rows:
            table.add_row(*map(escape, row))
        console.print(table)
    for at, source in enumerate(page.sources, 1):
        console.print(escape(f"[{at}] {source}"), highlight=False)
