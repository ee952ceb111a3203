"""How far Hypothesis searches: a few examples, the same in each run.

LABKIT_EXAMPLES=2000 searches longer, with new examples in each run.
"""

import os

from hypothesis import HealthCheck, settings

EXAMPLES = int(os.environ.get("LABKIT_EXAMPLES", "0"))
bounded = settings(
    max_examples=EXAMPLES or 40, derandomize=not EXAMPLES, database=None, deadline=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
fewer = settings(bounded, max_examples=EXAMPLES or 10)
