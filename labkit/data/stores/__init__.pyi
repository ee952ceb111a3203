# fmt: off
from .base import FolderStore as FolderStore, HasSizes as HasSizes, Store as Store
from .opening import open_store as open_store
from .simulated import DISKS as DISKS
