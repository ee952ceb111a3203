# fmt: off
from .ladder import draw_figure as draw_figure, is_ladder as is_ladder, is_limit as is_limit
