"""`python -m labkit`."""

from labkit.lab import app

app(prog_name="python -m labkit")
