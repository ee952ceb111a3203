"""`python -m labkit site`: the options."""

from pathlib import Path
from typing import Annotated

import typer

from labkit.lab.scripts import one_line_errors


def site(
    folder: Annotated[Path, typer.Argument(readable=False, help="Folder for the pages: new, or with an earlier site.")],
    only: Annotated[str, typer.Option(help="Notebooks with pages, by the start of their names: 00,02.")] = "",
) -> None:
    """Write the stored notebooks, the API, claims, peers and records as static pages that open from the disk."""
    from labkit.lab.site.building import build_site

    with one_line_errors("labkit", ImportError, OSError, ValueError):
        built = build_site(folder, only=only)
    for warning in built.warnings:
        typer.echo(warning, err=True)
    typer.echo(f"wrote {built.index}, with {len(built.notebooks)} notebooks")
