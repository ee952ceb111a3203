# fmt: off
from .base import (
    Blob as Blob, Extent as Extent, LocalBlob as LocalBlob, allow_requests as allow_requests,
    is_http_url as is_http_url, is_url as is_url, open_blob as open_blob, open_buffered as open_buffered,
    refuse_storage_options as refuse_storage_options,
)
from .fsspec_client import ObjectClient as ObjectClient, known_schemes as known_schemes
from .http_client import HttpClient as HttpClient, split_credentials as split_credentials
from .pagecache import evict as evict
from .remote import HttpBlob as HttpBlob
