from .dali import PEERS_HERE as PEERS_HERE
from .own import (
    BASELINE as BASELINE,
    DECODE_LIMIT as DECODE_LIMIT,
    LIMITS as LIMITS,
    MEMCPY_LIMIT as MEMCPY_LIMIT,
    NAIVE as NAIVE,
    OWN as OWN,
)
