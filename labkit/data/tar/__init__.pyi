# fmt: off
from .convert import convert_tar as convert_tar
from .headers import BoundedInfo as BoundedInfo
from .index import TarError as TarError
from .store import TarStore as TarStore
from .stream import Source as Source, TarStream as TarStream, unpacked as unpacked
