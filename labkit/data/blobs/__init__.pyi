from .base import (
    Blob as Blob,
    Extent as Extent,
    LocalBlob as LocalBlob,
    buffered as buffered,
    check_options as check_options,
    is_url as is_url,
    open_blob as open_blob,
)
from .fsspec_client import (
    asking as asking,
    filesystem_of as filesystem_of,
    known_schemes as known_schemes,
    secrets_of as secrets_of,
)
from .http_client import HttpClient as HttpClient, without_credentials as without_credentials
from .pagecache import evict as evict
