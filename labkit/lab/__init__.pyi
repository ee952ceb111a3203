# fmt: off
from .cli import app as app
