"""Extract tars, each into a folder of its own, whole or not at all.

    python data_scripts/extract_tars.py data/marigold hypersim_processed_train.tar --verify
    python data_scripts/extract_tars.py tars ILSVRC2012_img_train.tar
    python data_scripts/extract_tars.py train tars/ILSVRC2012_img_train/*.tar

A rerun resumes, or leaves finished folders alone; with --verify it compares them with their archives.
"""

import os
from pathlib import Path
from typing import Annotated

import typer

from labkit import extract_tars
from labkit.core.stdio import print_utf8

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    root: Annotated[Path, typer.Argument(readable=False, help="Folder for their folders; made if missing.")],
    archives: Annotated[
        list[Path], typer.Argument(readable=False, help="Tars, plain or compressed by gzip, bzip2 or xz.")
    ],
    verify: Annotated[bool, typer.Option("--verify", help="Compare all bytes with the archives.")] = False,
    num_workers: Annotated[int | None, typer.Option(help="Default: the usable cores.", min=0)] = None,
    engine: Annotated[str, typer.Option(help="local (processes), threads or ray (more than one machine).")] = "local",
    address: Annotated[str | None, typer.Option(help="Of the Ray cluster, with --engine ray: host:port.")] = None,
) -> None:
    """Extract each of ARCHIVES into a folder of its own under ROOT."""
    options = {"engine": engine, "num_workers": num_workers, "address": address}
    try:
        folders = extract_tars(archives, root, verify=verify, **options)
    except (RuntimeError, ImportError, ValueError, OSError) as error:
        typer.echo(f"extract_tars: {error}", err=True)
        raise typer.Exit(2) from error
    state = "the same as its archive" if verify else "whole"
    typer.echo(os.fsencode(f"{root}: {len(folders)} folders, each {state}"))  # names may be broken UTF-8


if __name__ == "__main__":
    print_utf8()
    app()
