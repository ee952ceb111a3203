"""Make pairs of a photo and its depth without a download, in the layout that Marigold trains from.

    python data_scripts/make_depth.py depth/motorcycle 128 --tar
    python data_scripts/make_depth.py /shared/motorcycle 10000 --engine ray --address auto

A rerun makes only what is missing.
"""

import os
from pathlib import Path
from typing import Annotated

import typer

from labkit import ItemErrors, make_depth
from labkit.core.stdio import print_utf8

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    root: Annotated[Path, typer.Argument(readable=False, help="Folder to fill; made if missing.")],
    count: Annotated[int, typer.Argument(help="Number of pairs.")],
    seed: Annotated[int, typer.Option(help="Another seed, another set.")] = 0,
    tar: Annotated[bool, typer.Option("--tar", help="Write the tar too.")] = False,
    engine: Annotated[str, typer.Option(help="local, threads or ray.")] = "local",
    num_workers: Annotated[int | None, typer.Option(help="Default: the usable cores.", min=0)] = None,
    address: Annotated[str | None, typer.Option(help="Ray cluster to join, such as auto.")] = None,
) -> None:
    """Make COUNT pairs under ROOT/train, their list, and with --tar the tar."""
    try:
        folder = make_depth(root, count, seed=seed, tar=tar, engine=engine, num_workers=num_workers, address=address)
    except (ValueError, OSError, ImportError, ItemErrors) as error:
        typer.echo(f"make_depth: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(os.fsencode(f"{folder}: {count} pairs"))  # names may be broken UTF-8


if __name__ == "__main__":
    print_utf8()
    app()
