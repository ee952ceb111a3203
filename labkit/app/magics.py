"""`%%variant LABEL`: like `%%timeit`, but its runs go into a frame. `%%watch`: what a training in a cell waits for."""

import ast
from collections.abc import Iterator
from contextlib import suppress
from types import CodeType
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, magics_class, output_can_be_silenced
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.display import display

from labkit.errors import NothingSeen
from labkit.util.machine import missing_library, scale
from labkit.watching.program import Watched, watch

if TYPE_CHECKING:  # `%%watch` needs no pandas
    import pandas as pd


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
        try:
            from labkit.measure.compare import compare
        except ModuleNotFoundError as error:
            raise UsageError(str(missing_library("%%variant", "loaders", error))) from None

        options = parse_argstring(self.variant, line)
        label = options.label.strip("\"'")
        earlier = self._find_frame(options.into)
        code, _ = self._compile(cell, has_value=False)
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
    @output_can_be_silenced
    @cell_magic
    def watch(self, line: str, cell: str) -> Any:
        """Run this cell and show what its training waited for; the cell itself stays as it is.

        A cell that is interrupted, or raises an error, is reported on as far as it came. The value of the last line is
        shown, as that of any cell.
        """
        try:
            name = parse_argstring(self.watch, line).name
        except UsageError as error:
            told = "`%%watch` takes a name for its report, and no options: `labkit watch` has them, for a script"
            raise UsageError(f"{error}. {told}") from None
        self.shell.user_ns.pop(name, None)  # of an earlier run
        code, last = self._compile(cell, has_value=True)
        try:
            with watch() as watched:
                exec(code, self.shell.user_ns)  # noqa: S102 - the cell that the reader wrote and ran
                value = last and eval(last, self.shell.user_ns)  # noqa: S307 - as its last line
        except BaseException:
            with suppress(NothingSeen):
                self._show_report(watched, name)
            raise
        try:
            self._show_report(watched, name)
        except NothingSeen as error:
            raise UsageError(str(error)) from None
        return value

    def _show_report(self, watched: Watched, name: str) -> None:
        self.shell.user_ns[name] = watched.report()
        display(self.shell.user_ns[name])

    def _compile(self, cell: str, *, has_value: bool) -> tuple[CodeType, CodeType | None]:
        """A cell's code, known to tracebacks by its lines; with `has_value`, an expression in the last line apart."""
        source = self.shell.transform_cell(cell)
        file = self.shell.compile.cache(source, self.shell.execution_count, raw_code=cell)
        tree: Any = self.shell.compile.ast_parse(source, filename=file)
        last = None
        if has_value and tree.body and isinstance(tree.body[-1], ast.Expr):
            last = compile(ast.Expression(tree.body.pop().value), file, "eval")
        return self.shell.compile(tree, file, "exec"), last

    def _run_cell(self, code: CodeType, n_images: int) -> Iterator[int]:
        exec(code, self.shell.user_ns)  # noqa: S102 - the cell that the reader wrote and ran
        yield n_images

    def _find_frame(self, name: str) -> "pd.DataFrame | None":
        earlier = self.shell.user_ns.get(name)
        import pandas as pd

        if earlier is not None and not (isinstance(earlier, pd.DataFrame) and "variant" in earlier):
            kind = type(earlier).__name__
            raise UsageError(f"`{name}` holds a {kind}, not a frame of runs: choose another name with --into")
        return None if earlier is None or earlier.empty else earlier


def _replace_runs(earlier: "pd.DataFrame", runs: "pd.DataFrame") -> "pd.DataFrame":
    """`earlier` with `runs` in place of the earlier ones of their variant, or at the end; the baseline stays."""
    import pandas as pd

    runs["baseline"] = earlier["baseline"].iloc[0]
    labels = list(dict.fromkeys([*earlier["variant"], *runs["variant"]]))
    both = pd.concat([earlier[earlier["variant"] != runs["variant"].iloc[0]], runs], ignore_index=True)
    return both.sort_values("variant", key=lambda column: column.map(labels.index), kind="stable", ignore_index=True)
