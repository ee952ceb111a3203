"""The file of a watched process: `python start.py OPTIONS [-m] SCRIPT [ARGUMENTS]`, with the options as JSON.

`labkit watch` becomes this process, so that the script runs in an interpreter which has imported no library yet: what
it sets before its own imports has its effect, as under `python`. Nothing of labkit that this imports imports torch,
NumPy, pandas, Matplotlib or rich.
"""

import json
import os
import sys
from importlib.util import find_spec

if not sys.flags.safe_path:
    del sys.path[0]  # this file's folder, whose modules would hide some of the standard library


_FOLDER = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 2))


def main() -> None:
    """Run the script, watched."""
    found = find_spec("labkit")
    if found is None or found.origin != os.path.join(_FOLDER, "labkit", "__init__.py"):
        sys.path.insert(0, _FOLDER)  # a clone that is not installed: its workers must find it, too
    from labkit.watching.program import WatchOptions, watch_script

    _, options, *program = sys.argv
    watch_script(program, WatchOptions(**json.loads(options)))


if __name__ == "__main__":
    main()
