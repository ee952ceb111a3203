# fmt: off
from .costs import LoaderCosts as LoaderCosts, loader_costs as loader_costs
from .cures import Cure as Cure
from .estimate import Estimate as Estimate
from .inputs import INPUTS as INPUTS
from .page import Page as Page
from .planning import plan as plan
from .plot import plot_plan as plot_plan
from .published import PUBLISHED_TRAINING as PUBLISHED_TRAINING, STORAGES as STORAGES, Storage as Storage
from .result import Plan as Plan
