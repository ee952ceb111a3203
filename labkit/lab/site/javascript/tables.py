"""What of Python is known in JavaScript: functions and methods that `py` has, operators, formats."""

import ast

# Python's name -> the arguments that may be given by name, in their order. `py` has all of them.
FUNCTIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("dict", "enumerate", "float", "len", "list", "map", "max", "min", "next", "iter"), ()),
    "set": (), "str": (),
    "any": (), "all": (), "abs": (), "tuple": (), "sorted": ("key",), "zip": (), "dict.fromkeys": (), "math.ceil": (),
    "np.array": (), "np.asarray": (), "np.bincount": ("minlength",), "np.ceil": (), "np.maximum": (), "np.median": (),
    "np.minimum": (), "np.minimum.reduce": (), "np.ones": (), "np.ones_like": (), "np.quantile": (),
}  # fmt: skip
# Python's method -> the function of `py`, and the arguments that may be given by name.
METHODS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in ("append", "endswith", "get", "index", "items", "join", "keys", "lower", "split")},
    **{name: (name,) for name in ("startswith", "strip", "values")}, "argmin": ("argmin", "axis"),
    "format": ("format_text",), "replace": ("replace_text",),
}  # fmt: skip
SKIPPED = ("strict",)  # arguments that change nothing
OPERATIONS = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Mod: "mod", ast.BitOr: "union",
}  # fmt: skip
COMPARISONS = {ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne"}
FORMATS = ("", ",", ",.0f", ".0f", ".2f", ".0%", "g", ".3g", ",.10g")
RESERVED = set(
    """arguments await break case catch class const continue debugger default delete do else enum eval export extends
    false finally for function if implements import in instanceof interface let new null package private protected
    public py return static super switch this throw true try typeof undefined var void while with yield""".split()  # noqa: SIM905
)
