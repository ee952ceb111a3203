# fmt: off
from .files import unpack as unpack
from .plan import plan_members as plan_members
