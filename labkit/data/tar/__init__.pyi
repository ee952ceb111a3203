# fmt: off
from .compressions import TAR_SUFFIXES as TAR_SUFFIXES
from .errors import TarError as TarError
from .store import TarStore as TarStore
from .stream import TarStream as TarStream, convert_tar as convert_tar
from .index import read_index as read_index
