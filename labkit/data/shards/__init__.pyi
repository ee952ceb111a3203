# fmt: off
from .write import write_shards as write_shards
