from .atomic import remove_leftovers as remove_leftovers, write_whole as write_whole, written_whole as written_whole
from .credentials import redacted as redacted, shown as shown, tells as tells
from .lazy import Lazy as Lazy, PerProcess as PerProcess
from .limits import (
    MAX_MEMBERS as MAX_MEMBERS,
    MAX_TAR_HEADER_BYTES as MAX_TAR_HEADER_BYTES,
    MAX_UNPACKER_BYTES as MAX_UNPACKER_BYTES,
    VARIABLE as VARIABLE,
    max_file_bytes as max_file_bytes,
)
from .locks import beside as beside, locked as locked
from .machine import (
    NOTEBOOK_FOLDER as NOTEBOOK_FOLDER,
    Scale as Scale,
    core_limits as core_limits,
    env_id as env_id,
    environment as environment,
    home as home,
    package_version as package_version,
    photo_root as photo_root,
    scale as scale,
    usable_cores as usable_cores,
)
from .names import (
    IMAGE_SUFFIXES as IMAGE_SUFFIXES,
    as_key as as_key,
    as_path as as_path,
    is_image as is_image,
    names_a_file as names_a_file,
)
from .png import png_base64 as png_base64, png_bytes as png_bytes
from .progress import progress_bar as progress_bar
from .rng import kept_global_state as kept_global_state
from .scratch import ScratchFolder as ScratchFolder
from .stdio import print_utf8 as print_utf8
from .strings import PackedStrings as PackedStrings
from .tensor_trees import map_tensors as map_tensors, tensors as tensors
from .threads import compute_alone as compute_alone
