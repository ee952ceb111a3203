# fmt: off
from .costs import DATA as DATA, LoaderCosts as LoaderCosts, loader_costs as loader_costs
from .cures import Cure as Cure
from .estimate import (
    Estimate as Estimate, N_DRAWS as N_DRAWS, QUANTILE as QUANTILE, deviates as deviates,
    format_number as format_number,
)
from .inputs import INPUTS as INPUTS
from .page import GROUPS as GROUPS, Page as Page, page_row as page_row
from .planning import DTYPES as DTYPES, plan as plan
from .plot import plot_plan as plot_plan
from .published import PUBLISHED_TRAINING as PUBLISHED_TRAINING, STORAGES as STORAGES, Storage as Storage
from .result import Plan as Plan
