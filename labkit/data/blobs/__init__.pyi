# fmt: off
from .base import (
    Blob as Blob, Extent as Extent, LocalBlob as LocalBlob, buffered as buffered, check_options as check_options,
    is_url as is_url, open_blob as open_blob,
)
from .fsspec_client import (
    known_schemes as known_schemes, known_secrets as known_secrets, open_filesystem as open_filesystem,
    translated_errors as translated_errors,
)
from .http_client import HttpClient as HttpClient, without_credentials as without_credentials
from .pagecache import evict as evict
