from .folder import FolderStore as FolderStore, Store as Store, open_store as open_store
from .http_listing import address as address, listed_images as listed_images
from .simulated import DISKS as DISKS
