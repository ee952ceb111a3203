# fmt: off
from .util.files import ScratchFolder as ScratchFolder
from .util.machine import (
    Scale as Scale,
    env_id as env_id,
    environment as environment,
    photo_root as photo_root,
    scale as scale,
    usable_cores as usable_cores,
)
from .util.parallel import ItemErrors as ItemErrors, map_items as map_items
from .util.strings import PackedStrings as PackedStrings
from .measure.compare import VariantError as VariantError, compare as compare
from .measure.frames import (
    epoch_time as epoch_time,
    from_timeit as from_timeit,
    from_timer as from_timer,
    load_frame as load_frame,
    save_frame as save_frame,
)
from .measure.plots import (
    plot_ladder as plot_ladder,
    plot_pareto as plot_pareto,
    plot_speedup as plot_speedup,
    plot_stalls as plot_stalls,
    plot_throughput as plot_throughput,
    plot_timeline as plot_timeline,
    put_legend_below as put_legend_below,
    write_title as write_title,
)
from .measure.readbacks import count_readbacks as count_readbacks
from .measure.statistics import InstabilityWarning as InstabilityWarning, conclude as conclude, summarize as summarize
from .measure.steady import (
    ReplayLoader as ReplayLoader,
    StageClock as StageClock,
    whole_pass as whole_pass,
    with_step as with_step,
)
from .measure.traces import save_trace as save_trace
from .measure.usage import tree_memory as tree_memory
from .data.blobs import evict as evict, resident_fraction as resident_fraction
from .data.buckets import Buckets as Buckets, bucket_shapes as bucket_shapes
from .data.dataset import ImageDataset as ImageDataset, PILDataset as PILDataset, collate as collate
from .data.decode import (
    DECODERS as DECODERS,
    DecodeError as DecodeError,
    decode as decode,
    missing_decoders as missing_decoders,
)
from .data.depth import DepthPairs as DepthPairs
from .data.extract import extract_tars as extract_tars
from .data.labels import LabelWarning as LabelWarning
from .data.pixels import PixelError as PixelError, PixelStore as PixelStore
from .data.remote import HttpStore as HttpStore, ObjectStore as ObjectStore, open_store as open_store
from .data.samples import make_depth as make_depth, make_photos as make_photos
from .data.shard_cache import ShardCache as ShardCache
from .data.shards_read import (
    ShardWarning as ShardWarning,
    read_shards as read_shards,
    shuffle_quality as shuffle_quality,
)
from .data.shards_write import write_shards as write_shards
from .data.simulated_disks import DISKS as DISKS, SimulatedStore as SimulatedStore
from .data.sizes import collect_sizes as collect_sizes
from .data.stores import FolderStore as FolderStore, Store as Store
from .data.tar import TarStore as TarStore
from .loading.agreement import agreement as agreement, drawn_crops as drawn_crops
from .loading.augment import (
    RECIPES as RECIPES,
    Recipe as Recipe,
    make_augment as make_augment,
    plot_images as plot_images,
)
from .loading.batch_loader import BatchLoader as BatchLoader
from .loading.bucket_sampler import BucketBatchSampler as BucketBatchSampler
from .loading.limits import decode_limit as decode_limit, memcpy_limit as memcpy_limit
from .loading.mix import cutmix as cutmix, mixup as mixup
from .loading.prefetch import CUDAPrefetcher as CUDAPrefetcher
from .loading.samplers import LoaderWarning as LoaderWarning
from .loading.seeding import count_repeats as count_repeats
from .loading.torch_loader import (
    Loader as Loader,
    LoaderConfig as LoaderConfig,
    WorkerDied as WorkerDied,
    make_loader as make_loader,
)
from .simulation.context import SimulatedLoader as SimulatedLoader, simulated_cuda as simulated_cuda
from .simulation.simulated_device import SimulatedDevice as SimulatedDevice, Simulation as Simulation
from .simulation.timeline import Stamped as Stamped, trace as trace
from .watch.diagnose import diagnose as diagnose
from .watch.findings import Diagnosis as Diagnosis
from .watch.program import watch as watch
from .watch.tune import Tuned as Tuned, tune as tune
from .plan.formulas import Estimate as Estimate, LoaderCosts as LoaderCosts, loader_costs as loader_costs
from .plan.planning import Plan as Plan, plan as plan, plot_plan as plot_plan
from .plan.published import PUBLISHED_TRAINING as PUBLISHED_TRAINING, Storage as Storage
from .peers.registry import (
    PEERS as PEERS,
    Peer as Peer,
    Work as Work,
    compare_peers as compare_peers,
    plot_peers as plot_peers,
)
from .course.exercises import check as check
from .course.feeding import (
    Feeding as Feeding,
    FeedingExplorer as FeedingExplorer,
    explore as explore,
    feeding_times as feeding_times,
    plot_feeding as plot_feeding,
    simulate_feeding as simulate_feeding,
)
from .course.ledger import claims as claims, plot_claims as plot_claims
from .course.oracles import (
    broken_files as broken_files,
    child_exits as child_exits,
    conformance as conformance,
    oracle_files as oracle_files,
    plot_conformance as plot_conformance,
    plot_pictures as plot_pictures,
)
from .course.predictions import (
    Score as Score,
    plot_guesses as plot_guesses,
    predict as predict,
    predictions as predictions,
    score as score,
)
from .course.reference import reference_runs as reference_runs, show_reference as show_reference
from .course.servers import serve_folder as serve_folder, serve_s3 as serve_s3
from .course.starting import Start as Start, where_to_start as where_to_start

__version__: str
