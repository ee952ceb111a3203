# fmt: off
from .ladder import draw_figure as draw_figure, is_ladder as is_ladder, is_limit as is_limit
from .start import Start as Start, start_from as start_from
