# fmt: off
from .readers import choose_readers as choose_readers
from .sd_metadata import write_metadata_cache as write_metadata_cache
