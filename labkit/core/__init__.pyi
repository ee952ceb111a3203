# fmt: off
from .allocator import keep_freed_memory as keep_freed_memory
from .arguments import (
    require_choice as require_choice, require_fraction as require_fraction, require_int as require_int,
    require_positive as require_positive,
)
from .atomic import (
    atomic_path as atomic_path, remove_leftovers as remove_leftovers, write_all_atomic as write_all_atomic,
    write_atomic as write_atomic,
)
from .credentials import contains_secret as contains_secret, redact as redact, strip_credentials as strip_credentials
from .folders import Folder as Folder, walk as walk
from .images import encode_image as encode_image, png_base64 as png_base64, png_bytes as png_bytes
from .lazy import Lazy as Lazy, PerProcess as PerProcess
from .limits import (
    MAX_FILE_VARIABLE as MAX_FILE_VARIABLE, MAX_MEMBERS as MAX_MEMBERS, MAX_PATH_BYTES as MAX_PATH_BYTES,
    MAX_TAR_HEADER_BYTES as MAX_TAR_HEADER_BYTES, MAX_XZ_DICTIONARY_BYTES as MAX_XZ_DICTIONARY_BYTES,
    max_file_bytes as max_file_bytes,
)
from .locks import acquire_lock as acquire_lock, file_lock as file_lock, has_file_locks as has_file_locks
from .machine import (
    DISTRIBUTION as DISTRIBUTION, IS_CLONE as IS_CLONE, NOTEBOOK_FOLDER as NOTEBOOK_FOLDER, Scale as Scale,
    core_limits as core_limits, device_kind as device_kind,
    env_id as env_id, environment as environment, install_command as install_command,
    installed_versions as installed_versions, labkit_home as labkit_home, main_is_script as main_is_script,
    name_run as name_run,
    package_version as package_version, photo_root as photo_root, scale as scale, usable_cores as usable_cores,
)
from .names import (
    IMAGE_SUFFIXES as IMAGE_SUFFIXES, OTHER_IMAGE_SUFFIXES as OTHER_IMAGE_SUFFIXES,
    checked_suffixes as checked_suffixes, images_among as images_among, is_file_key as is_file_key,
    is_hidden as is_hidden, is_image as is_image, key_from_name as key_from_name, n_images as n_images,
    path_from_key as path_from_key,
    sibling_path as sibling_path,
)
from .progress import progress_bar as progress_bar
from .resume import (
    check_count as check_count, check_same_job as check_same_job, claim_folder as claim_folder,
    damage_named as damage_named, foreign_names as foreign_names, holds_record as holds_record,
    read_record as read_record, write_record as write_record,
)
from .rng import preserve_rng_state as preserve_rng_state
from .scratch import ScratchFolder as ScratchFolder
from .stdio import print_utf8 as print_utf8
from .strings import PackedStrings as PackedStrings
from .tensor_trees import (
    has_own_to as has_own_to, is_tensor as is_tensor, iter_tensors as iter_tensors, map_tensors as map_tensors,
    move_tensors as move_tensors,
)
from .threads import use_one_torch_thread as use_one_torch_thread
