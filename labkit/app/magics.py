"""`%%variant LABEL`: like `%%timeit`, but its runs go into a frame. `%%watch`: what a training in a cell waits for."""

from collections.abc import Iterator
from types import CodeType

import pandas as pd
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.display import display

from labkit.errors import NothingSeen
from labkit.measure.compare import compare
from labkit.util.machine import scale
from labkit.watching.program import watch


@magics_class
class VariantMagics(Magics):
    """Cell magics of `%load_ext labkit`."""

    shell: InteractiveShell  # who registers magics has one

    @magic_arguments()
    @argument("label", help="name of the variant; quote it if it contains spaces")
    @argument("-n", "--images", type=int, required=True, help="number of images that one run of the cell handles")
    @argument("-r", "--rounds", type=int, help="measured runs (default: set by the scale)")
    @argument("-w", "--warmups", type=int, default=1, help="warm-up runs before them (default 1)")
    @argument("-i", "--into", default="runs", help="name of the frame to add the runs to (default: runs)")
    @cell_magic
    def variant(self, line: str, cell: str) -> None:
        """Time this cell as one variant and add its runs to the notebook's frame.

        The first variant of a frame is its baseline; running a label again replaces its runs. Cells run one after
        another, so rounds are not interleaved, and `summarize` says so: `labkit.compare` is stricter.
        """
        options = parse_argstring(self.variant, line)
        label = options.label.strip("\"'")
        earlier = self._find_frame(options.into)
        code = compile(self.shell.transform_cell(cell), f"<variant {label}>", "exec")
        runs = compare(
            {label: lambda: self._run_cell(code, options.images)},
            baseline=label, rounds=options.rounds or scale().rounds, warmups=options.warmups,
        )  # fmt: skip
        runs["order"] = float("nan")
        self.shell.user_ns[options.into] = runs if earlier is None else _replace_runs(earlier, runs)
        rates = runs.loc[~runs["is_warmup"], "images_per_s"]
        print(f"{label}: median {rates.median():,.0f} images/s over {len(rates)} runs (added to `{options.into}`)")

    @magic_arguments()
    @argument("name", nargs="?", default="watched", help="name for the report (default: watched)")
    @cell_magic
    def watch(self, line: str, cell: str) -> None:
        """Run this cell and show what its training waited for; the cell itself stays as it is."""
        name = parse_argstring(self.watch, line).name
        code = compile(self.shell.transform_cell(cell), "<watch>", "exec")
        with watch() as watched:
            exec(code, self.shell.user_ns)  # noqa: S102 - the cell that the reader wrote and ran
        try:
            self.shell.user_ns[name] = watched.report()
        except NothingSeen as error:
            raise UsageError(str(error)) from None
        display(self.shell.user_ns[name])

    def _run_cell(self, code: CodeType, n_images: int) -> Iterator[int]:
        exec(code, self.shell.user_ns)  # noqa: S102 - the cell that the reader wrote and ran
        yield n_images

    def _find_frame(self, name: str) -> pd.DataFrame | None:
        earlier = self.shell.user_ns.get(name)
        if earlier is not None and not (isinstance(earlier, pd.DataFrame) and "variant" in earlier):
            kind = type(earlier).__name__
            raise UsageError(f"`{name}` holds a {kind}, not a frame of runs: choose another name with --into")
        return None if earlier is None or earlier.empty else earlier


def _replace_runs(earlier: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """`earlier` with `runs` in place of the earlier ones of their variant, or at the end; the baseline stays."""
    runs["baseline"] = earlier["baseline"].iloc[0]
    labels = list(dict.fromkeys([*earlier["variant"], *runs["variant"]]))
    both = pd.concat([earlier[earlier["variant"] != runs["variant"].iloc[0]], runs], ignore_index=True)
    return both.sort_values("variant", key=lambda column: column.map(labels.index), kind="stable", ignore_index=True)
