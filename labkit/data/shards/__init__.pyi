# fmt: off
from .shuffling import write_shards as write_shards
