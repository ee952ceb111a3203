# fmt: off
from .compressions import TAR_SUFFIXES as TAR_SUFFIXES
from .convert import convert_tar as convert_tar
from .errors import TarError as TarError
from .store import TarStore as TarStore
from .stream import TarStream as TarStream
from .index import read_index as read_index
