# fmt: off
from .cli import app as app
from .magic import VariantMagics as VariantMagics
