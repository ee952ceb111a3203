# fmt: off
from .engines import ItemErrors as ItemErrors, check_engine as check_engine, map_items as map_items
from .pools import format_error as format_error
