"""Loader settings that are set from outside of a script, to try what a change would bring."""

import inspect
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

_VARIABLE = "LABKIT_WATCH_SETTINGS"
_OF_WORKERS = ("persistent_workers", "prefetch_factor")


@dataclass(frozen=True)
class Settings:
    """Arguments of `torch.utils.data.DataLoader` for some loaders of a script.

    numbers: Which loaders, in the order in which the script makes them, from 0.
    """

    numbers: list[int] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_environment(cls) -> "Settings":
        """What a trial set for this process, and for no process that it starts; none outside of one."""
        return cls(**json.loads(os.environ.pop(_VARIABLE, "{}")))

    def environment(self) -> dict[str, str]:
        """For a process that takes them over."""
        return {_VARIABLE: json.dumps(asdict(self))}

    def make(self, number: int, init: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Call `DataLoader.__init__`, with these settings if the loader has one of the numbers."""
        if number not in self.numbers:
            init(*args, **kwargs)
            return
        own = inspect.signature(init).bind(*args, **kwargs).arguments
        init(**{**own, **_fitting(own, self.arguments)})


def _fitting(own: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that only workers take are left out without workers."""
    num_workers = changed.get("num_workers", own.get("num_workers", 0))
    return {name: value for name, value in changed.items() if num_workers or name not in _OF_WORKERS}
