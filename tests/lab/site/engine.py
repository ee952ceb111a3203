"""JavaScript without a browser."""

import json

import pytest

from labkit.lab.site import plan_form

NUMBERS = (plan_form.FOLDER / "plan_numbers.js").read_text()


class Engine:
    """Runs code once, and then expressions with it.

    Args:
        code: Uses `py`, unless it defines `py` itself.
    """

    def __init__(self, code, defines_py=False):
        racer = pytest.importorskip("py_mini_racer", reason="mini-racer is missing: pip install -e '.[test]'")
        self._context = racer.MiniRacer()
        self._context.eval(code if defines_py else f"const py = (() => {{ {NUMBERS} return py; }})();\n{code}")

    def run(self, expression):
        """The value of an expression, as JSON has it; a ValueError of the code is Python's."""
        text = self._context.eval(
            f"(() => {{ try {{ return JSON.stringify({{ value: {expression} }}); }} "
            "catch (error) { if (error instanceof TypeError || error instanceof ReferenceError) throw error; "
            "return JSON.stringify({ error: error.message }); } })()"
        )
        found = json.loads(text)
        if "error" in found:
            raise ValueError(found["error"])
        return found["value"]

    def call(self, name, *arguments):
        return self.run(f"{name}({', '.join(map(json.dumps, arguments))})")
