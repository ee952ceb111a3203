# fmt: off
from .folder import FolderStore as FolderStore, Store as Store, open_store as open_store
from .http_listing import listed_images as listed_images, url_of_key as url_of_key
from .simulated import DISKS as DISKS
