# fmt: off
from .base import HasSizes as HasSizes, Store as Store
from .folder import FolderStore as FolderStore
from .opening import open_store as open_store
from .simulated import DISKS as DISKS
