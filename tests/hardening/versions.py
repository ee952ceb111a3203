"""Run the test suite with other versions and extras, each in a virtual environment that uv makes for it.

    python -m tests.hardening.versions lowest  # the lowest that pyproject.toml allows
    python -m tests.hardening.versions newest
    python -m tests.hardening.versions bare    # the newest, without other extras: only the lab and what runs tests
    python -m tests.hardening.versions newest tests/data/test_decode.py --durations=5

Run it from the repository's root. Further arguments go to pytest; uv's own variables work too.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

RUNNERS = ["pytest", "pytest-timeout", "pytest-xdist", "nbval", "hypothesis", "mypy", "psutil"]
INSTALLED = {
    "lowest": ["--resolution", "lowest-direct", "-e", ".[test]"],
    "newest": ["-e", ".[test]"],
    "bare": ["-e", ".[lab]", *RUNNERS],
}
NAMED = ("torch", "torchvision", "torchcodec", "numpy", "pandas", "scipy", "pillow")
UNSET = ("PYTHONPATH", "VIRTUAL_ENV", "LABKIT_SCALE")  # in the environment of the tests


def main(which: str, given: list[str]) -> int:
    """Make the environment, say what is in it, run pytest in it."""
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder, "venv", "bin", "python")
        subprocess.run(["uv", "--quiet", "venv", "--python", sys.executable, f"{folder}/venv"], check=True)
        subprocess.run(["uv", "--quiet", "pip", "install", "--python", python, *INSTALLED[which]], check=True)
        settings = {name: value for name, value in os.environ.items() if name not in UNSET}
        settings |= {"LABKIT_HOME": f"{folder}/home", "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
        if which == "bare":
            settings["LABKIT_LIBTURBOJPEG"] = os.devnull  # else the system's own would be found
        code = f"from importlib.metadata import version; print(*(f'{{n}} {{version(n)}}' for n in {NAMED!r}))"
        subprocess.run([python, "-c", code], check=True)
        return subprocess.run([python, "-m", "pytest", "-q", *given], env=settings, check=False).returncode


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in INSTALLED:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2:]))
