# fmt: off
from .core.machine import (
    Scale as Scale, env_id as env_id, environment as environment, photo_root as photo_root, scale as scale,
    usable_cores as usable_cores,
)
from .core.mapping.engines import ItemErrors as ItemErrors, map_items as map_items
from .core.scratch import ScratchFolder as ScratchFolder
from .core.strings import PackedStrings as PackedStrings
from .data.blobs.pagecache import evict as evict, resident_fraction as resident_fraction
from .data.datasets import ImageDataset as ImageDataset, PILDataset as PILDataset, collate as collate
from .data.decoders import (
    DECODERS as DECODERS, DecodeError as DecodeError, decode as decode, missing_decoders as missing_decoders,
)
from .data.depth.pairs import DepthPairs as DepthPairs
from .data.extract.extract import extract_tars as extract_tars
from .data.labels import LabelWarning as LabelWarning
from .data.pixels.store import PixelError as PixelError, PixelStore as PixelStore
from .data.samples.depth import make_depth as make_depth
from .data.samples.photos import make_photos as make_photos
from .data.shards.cache import ShardCache as ShardCache
from .data.shards.dataset import ShardWarning as ShardWarning
from .data.shards.read import read_shards as read_shards
from .data.shards.shuffling import shuffle_quality as shuffle_quality
from .data.shards.write import write_shards as write_shards
from .data.sizes.bucket_rules import bucket_shapes as bucket_shapes
from .data.sizes.buckets import Buckets as Buckets
from .data.sizes.collect import collect_sizes as collect_sizes
from .data.stores.base import FolderStore as FolderStore, Store as Store
from .data.stores.local_servers import serve_folder as serve_folder, serve_s3 as serve_s3
from .data.stores.opening import open_store as open_store
from .data.stores.remote import HttpStore as HttpStore, ObjectStore as ObjectStore
from .data.stores.simulated import DISKS as DISKS, SimulatedStore as SimulatedStore
from .data.tar.store import TarStore as TarStore
from .measure.epoch_times import epoch_time as epoch_time
from .measure.conclusion import conclude as conclude
from .measure.figures import put_legend_below as put_legend_below, write_title as write_title
from .measure.frames import (
    from_timeit as from_timeit, from_timer as from_timer, load_frame as load_frame, save_frame as save_frame,
)
from .measure.plots import (
    plot_ladder as plot_ladder, plot_pareto as plot_pareto, plot_speedup as plot_speedup,
    plot_stalls as plot_stalls, plot_throughput as plot_throughput, plot_timeline as plot_timeline,
)
from .measure.processes import tree_memory as tree_memory
from .measure.readbacks import count_readbacks as count_readbacks
from .measure.replay import ReplayLoader as ReplayLoader
from .measure.repetition import whole_pass as whole_pass, with_step as with_step
from .measure.stages import StageClock as StageClock
from .measure.summary import InstabilityWarning as InstabilityWarning, summarize as summarize
from .measure.timing import VariantError as VariantError, compare as compare
from .peers.registry import (
    PEERS as PEERS, Peer as Peer, Work as Work, compare_peers as compare_peers, plot_peers as plot_peers,
)
from .pipeline.agreement import agreement as agreement, drawn_crops as drawn_crops
from .pipeline.augment import RECIPES as RECIPES, Recipe as Recipe, make_augment as make_augment
from .pipeline.batch_loader.loader import BatchLoader as BatchLoader
from .pipeline.bucket_sampler import BucketBatchSampler as BucketBatchSampler
from .pipeline.images import plot_images as plot_images
from .pipeline.limits import decode_limit as decode_limit, memcpy_limit as memcpy_limit
from .pipeline.loader.config import LoaderConfig as LoaderConfig
from .pipeline.loader.loader import Loader as Loader, make_loader as make_loader
from .pipeline.loader.workers import WorkerDied as WorkerDied
from .pipeline.samplers import LoaderWarning as LoaderWarning
from .pipeline.mix import cutmix as cutmix, mixup as mixup
from .pipeline.prefetch import CUDAPrefetcher as CUDAPrefetcher
from .pipeline.simulation import (
    SimulatedDevice as SimulatedDevice, SimulatedLoader as SimulatedLoader, Simulation as Simulation,
    simulated_cuda as simulated_cuda,
)
from .pipeline.seeding import count_repeats as count_repeats
from .pipeline.timeline import Stamped as Stamped, trace as trace
from .pipeline.trace_file import save_trace as save_trace
from .teach.claims.judging import claims as claims
from .teach.claims.plots import plot_claims as plot_claims
from .teach.conformance import (
    broken_files as broken_files, child_exits as child_exits, conformance as conformance,
    oracle_files as oracle_files,
)
from .teach.conformance_plots import plot_conformance as plot_conformance, plot_pictures as plot_pictures
from .teach.exercises import check as check
from .teach.explore import explore as explore
from .teach.feeding import (
    Feeding as Feeding, FeedingExplorer as FeedingExplorer, feeding_times as feeding_times,
    plot_feeding as plot_feeding, simulate_feeding as simulate_feeding,
)
from .teach.predictions import (
    Score as Score, plot_guesses as plot_guesses, predict as predict, predictions as predictions, score as score,
)
from .teach.reference.runs import reference_runs as reference_runs, show_reference as show_reference
from .teach.start import Start as Start, where_to_start as where_to_start
from .tuning.diagnosis import Diagnosis as Diagnosis
from .tuning.plan.costs import LoaderCosts as LoaderCosts, loader_costs as loader_costs
from .tuning.plan.estimate import Estimate as Estimate
from .tuning.plan.planning import plan as plan
from .tuning.plan.plot import plot_plan as plot_plan
from .tuning.plan.published import PUBLISHED_TRAINING as PUBLISHED_TRAINING, Storage as Storage
from .tuning.plan.result import Plan as Plan
from .tuning.stalls import diagnose as diagnose
from .tuning.watch.session import watch as watch
from .tuning.tuner import Tuned as Tuned, tune as tune

__version__: str
