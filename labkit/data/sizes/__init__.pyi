# fmt: off
from .bucket_rules import bucket_shapes as bucket_shapes
from .buckets import Buckets as Buckets, upright_sizes as upright_sizes
from .readers import choose_readers as choose_readers, disk_under as disk_under
from .sd_metadata import write_metadata_cache as write_metadata_cache
