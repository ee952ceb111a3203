from .engines import ItemErrors as ItemErrors, check_engine as check_engine, map_items as map_items
from .pools import describe as describe
