"""What storage takes: the figures of three kinds, for arithmetic by hand."""

from typing import NamedTuple


class Disk(NamedTuple):
    """A kind of storage: what finding another place costs, and what one reader gets, in 1e6 bytes."""

    name: str
    bandwidth_mb_per_s: float
    seek_ms: float = 0.0
    latency_ms: float = 0.0


#: By name. Objects in S3 take 20 to 200 ms to the first byte, by AWS's own figures; here is the geometric mean.
#: https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance.html
DISKS = {
    "hdd": Disk("hard disk", 180.0, seek_ms=8.0),
    "network": Disk("network storage", 1000.0, latency_ms=1.0),
    "object": Disk("object storage", 90.0, latency_ms=63),
}
