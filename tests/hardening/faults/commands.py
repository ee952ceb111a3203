"""The commands under test: each data script, `labkit convert`, tours and `labkit diagnose`."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.hardening.faults.launch import REPO


@dataclass(frozen=True)
class Command:
    """A command, and what may be said of its output.

    Args:
        name: Its program and what tells it from others; one that ends in "local" starts workers, as its last "2" says.
        arguments: Separated by blanks. `{src}`, `{out}` and `{server}` stand for places of the trial.
        other_sources: Names of `make_sources` that it reads, besides those in its arguments.
        evolves: Patterns of files that have their name before their last content: any whole one will do.
        ready: What another run says, by an error, of what is there already.
        prepare: Called in the process before the script.
        timed: Its output holds times, so that files are compared by name, and frames by their rows.
        seconds: After which it hangs; the default is for a busy machine.
    """

    name: str
    arguments: str
    other_sources: tuple[str, ...] = ()
    evolves: tuple[str, ...] = ()
    ready: str = ""
    prepare: Callable[[Path, str], None] | None = None
    timed: bool = False
    seconds: float = 200.0

    program = property(lambda self: self.name.split()[0])
    local = property(lambda self: self.name.endswith(" local"))

    @property
    def main(self) -> str:
        """The file that Python runs."""
        script = "labkit/__main__.py" if self.program == "labkit" else f"data_scripts/{self.program}.py"
        return str(REPO / script)

    @property
    def sources(self) -> tuple[str, ...]:
        return (*re.findall(r"{src}/(\S+)", self.arguments), *self.other_sources)


def _own_notebooks(src: Path, server: str) -> None:
    from labkit.app import notebooks

    notebooks.find_notebooks.__defaults__ = ("", src / "notebooks")
    os.environ["LABKIT_SCALE"] = "ci"


def _few_photos(src: Path, server: str) -> None:
    from labkit.app import tour

    _own_notebooks(src, server)
    tour.make_scale_photos = lambda: None


_PHOTOS = ("out/set/manifest.json",)
_COMMANDS = (
    Command("make_photos", "{out}/set 5 --num-threads 2", evolves=_PHOTOS),
    Command("make_photos local", "{out}/set 5 --num-threads 2 --engine local", evolves=_PHOTOS),
    Command("make_depth", "{out}/set 1 --tar --num-workers 1"),
    Command("make_depth local", "{out}/set 2 --tar --num-workers 2"),
    Command("make_shards", "{src}/photos {out}/set --max-count 3 --seed 0 --engine threads"),
    Command("make_shards local", "{src}/photos.tar {out}/set --max-count 3 --num-workers 2"),
    Command("make_pixels", "{src}/photos {out}/set.pixels --num-workers 2"),
    Command("make_pixels local", "{src}/photos.tar {out}/set.pixels --num-workers 2 --engine local"),
    Command("extract_tars", "{out}/set {src}/photos.tar.gz"),
    Command("extract_tars local", "{out}/set {src}/photos.tar {src}/other.tar --num-workers 2"),
    Command("collect_sizes", "{src}/photos {out}/sizes.csv --no-caches --write-metadata-cache"),
    Command("collect_sizes local", "{src}/many {out}/sizes.csv --num-workers 2"),
    Command("labkit convert", "convert {src}/photos.tar.gz {out}/plain.tar", ready="exists: remove it"),
    Command("labkit tour", "tour", ("notebooks",), prepare=_few_photos, timed=True),
    Command("labkit tour --only 00", "tour --only 00 --scale ci", timed=True, seconds=400.0),
    # Two that measure what they are about, and start processes of all kinds.
    Command("labkit tour --only 03,08", "tour --only 03,08 --scale ci", timed=True, seconds=600.0),
    Command("labkit peers", "peers --only albumentations --scale ci --rounds 1", timed=True, seconds=400.0),
    Command(
        "labkit diagnose", "diagnose src.train:make_training --batches 2 --rounds 1", ("photos", "train.py"), timed=True
    ),
)
COMMANDS = {command.name: command for command in _COMMANDS}
