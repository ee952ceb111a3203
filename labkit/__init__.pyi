# fmt: off
from .errors import DecodeError as DecodeError, LabkitError as LabkitError
from .util.machine import scale as scale, usable_cores as usable_cores
from .util.parallel import map_items as map_items
from .util.strings import PackedStrings as PackedStrings
from .measure.compare import compare as compare
from .measure.frames import epoch_time as epoch_time, from_timeit as from_timeit, from_timer as from_timer
from .measure.plots import plot_speedup as plot_speedup, plot_stalls as plot_stalls
from .measure.statistics import conclude as conclude, summarize as summarize
from .measure.steady import (
    ReplayLoader as ReplayLoader,
    StageClock as StageClock,
    whole_pass as whole_pass,
    with_step as with_step,
)
from .data.buckets import Buckets as Buckets
from .data.dataset import ImageDataset as ImageDataset, PILDataset as PILDataset, collate as collate
from .data.decode import DECODERS as DECODERS, decode as decode
from .data.depth import DepthPairs as DepthPairs
from .data.pixels import PixelStore as PixelStore
from .data.remote import HttpStore as HttpStore, ObjectStore as ObjectStore, open_store as open_store
from .data.samples import make_photos as make_photos
from .data.shards_read import read_shards as read_shards
from .data.shards_write import write_shards as write_shards
from .data.sizes import collect_sizes as collect_sizes
from .data.stores import FolderStore as FolderStore
from .data.tar import TarStore as TarStore
from .data.tiles import cut_jpeg as cut_jpeg, tile_jpegs as tile_jpegs
from .loading.augment import make_augment as make_augment, plot_images as plot_images
from .loading.batch_loader import BatchLoader as BatchLoader
from .loading.bucket_sampler import BucketBatchSampler as BucketBatchSampler
from .loading.prefetch import CUDAPrefetcher as CUDAPrefetcher
from .loading.torch_loader import LoaderConfig as LoaderConfig, make_loader as make_loader
from .simulation.context import simulated_cuda as simulated_cuda
from .watching.diagnose import diagnose as diagnose
from .watching.program import watch as watch
from .watching.tune import tune as tune
from .planning.plan import plan as plan

__version__: str
