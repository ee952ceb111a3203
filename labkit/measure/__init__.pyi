# fmt: off
from .cores import CoreTime as CoreTime, core_time as core_time
from .epoch_times import epoch_time as epoch_time
from .conclusion import conclude as conclude, format_ratio as format_ratio
from .figures import (
    COLORS as COLORS, GUESS as GUESS, LIMIT as LIMIT, MARKERS as MARKERS, PREDICTED as PREDICTED, RUNS as RUNS,
    SMALL_PT as SMALL_PT, WIDTH_IN as WIDTH_IN, characters_per_line as characters_per_line,
    make_axes as make_axes, mark_simulated as mark_simulated, put_legend_below as put_legend_below,
    write_title as write_title,
)
from .frames import (
    COLUMNS as COLUMNS, MEASURE_VERSION as MEASURE_VERSION, load_frame as load_frame, make_frame as make_frame,
    measured_runs as measured_runs, save_frame as save_frame,
)
from .gil import GilError as GilError, find_sampler as find_sampler, gil_us_per_image as gil_us_per_image
from .guess_log import Prediction as Prediction, guesses as guesses, outcomes as outcomes
from .intervals import speedup_interval as speedup_interval, speedup_of as speedup_of
from .messages import tell_ratio as tell_ratio
from .plots import (
    ladder_rungs as ladder_rungs, plot_ladder as plot_ladder, plot_speedup as plot_speedup,
    plot_stalls as plot_stalls, plot_timeline as plot_timeline,
)
from .processes import PeakMemory as PeakMemory, apart as apart, tree_usage as tree_usage
from .readbacks import count_readbacks as count_readbacks
from .recording import (
    OUTCOME_COLUMNS as OUTCOME_COLUMNS, RESULTS_VARIABLE as RESULTS_VARIABLE, set_recorder as set_recorder,
)
from .replay import ReplayLoader as ReplayLoader, fresh as fresh, versions as versions
from .repetition import LoaderWrapper as LoaderWrapper, whole_pass as whole_pass, with_step as with_step
from .runs import count_images as count_images, page_cache_state as page_cache_state, synchronize as synchronize
from .summary import (
    disturbances as disturbances, paired_ratios as paired_ratios, quiet_summary as quiet_summary,
    summarize as summarize,
)
from .timing import (
    DifferentWorkWarning as DifferentWorkWarning, VariantError as VariantError, compare as compare,
)
