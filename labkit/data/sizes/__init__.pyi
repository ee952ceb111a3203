# fmt: off
from .readers import choose_readers as choose_readers, disk_under as disk_under
from .sd_metadata import write_metadata_cache as write_metadata_cache
