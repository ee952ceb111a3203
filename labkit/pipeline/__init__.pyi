# fmt: off
from .augment import (
    RECIPES as RECIPES, Recipe as Recipe, import_albumentations as import_albumentations,
    make_augment as make_augment,
)
from .bucket_sampler import BucketBatchSampler as BucketBatchSampler
from .limits import (
    decode_limit as decode_limit, entropy_limit as entropy_limit, memcpy_limit as memcpy_limit,
    write_limit as write_limit,
)
from .mix import cutmix as cutmix, mixup as mixup
from .prefetch import CUDAPrefetcher as CUDAPrefetcher
from .seeding import count_repeats as count_repeats
from .timeline import trace as trace
from .trace_file import save_trace as save_trace
