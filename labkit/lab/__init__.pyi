# fmt: off
from .cli import app as app, main as main
from .magic import VariantMagics as VariantMagics
from .scripts import (
    Address as Address, Engine as Engine, Ignore as Ignore, NumWorkers as NumWorkers, Root as Root, Seed as Seed,
    Source as Source, command as command,
)
