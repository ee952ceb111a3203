"""`python -m labkit`."""

from labkit.lab.cli import app

app(prog_name="python -m labkit")
