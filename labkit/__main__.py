"""`python -m labkit`."""

from labkit.cli import app

app(prog_name="python -m labkit")
