# fmt: off
from .expressions import Untranslatable as Untranslatable
from .translation import Translation as Translation
