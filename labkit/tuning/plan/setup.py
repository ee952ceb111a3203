"""What a plan is computed from, and what follows: draws of every line, the rate, and the scarcest resource."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from labkit.tuning.plan.ceilings import LINES, RESOURCES
from labkit.tuning.plan.estimate import N_DRAWS, Estimate
from labkit.tuning.plan.line import Draws, Line, compute

_RARE = 0.1  # share of the draws
_FEW_IN_FLIGHT = 1.1  # with less to gain, a thread that reads and decodes is held up by decoding


@dataclass(frozen=True, eq=False)
class Setup:
    """A training and the machines for it.

    inputs: By name, as `INPUTS` lists them.
    storage: Its name.
    is_remote: Images come over the network.
    data: What is stored, one of `DATA`.
    known: Costs by what is stored, as far as they are known.
    """

    inputs: Mapping[str, Estimate]
    storage: str
    is_remote: bool
    data: str
    known: Mapping[str, Mapping[str, Estimate]] = field(default_factory=dict)

    @property
    def lines(self) -> list[Line]:
        """Those that have a meaning here and whose inputs are known."""
        return [line for line in LINES if line.name in self.draws]

    @cached_property
    def draws(self) -> dict[str, Draws]:
        """Every input and line -> its draws."""
        draws = {name: estimate.draw(name) for name, estimate in self.inputs.items()}
        draws["n_storages"] = np.ones(N_DRAWS) if self.is_remote else draws["n_nodes"]
        return compute([line for line in LINES if self.is_remote or not line.is_remote], draws)

    @property
    def rate(self) -> Draws:
        """Images/s of the training."""
        return self.draws["images_per_s"]

    def median(self, name: str) -> float:
        return float(np.median(self.draws[name]))

    @cached_property
    def scarcities(self) -> dict[str, float]:
        """Ceiling -> in which share of the draws it is the smallest, the most frequent first."""
        names = [name for name in RESOURCES if name in self.draws]
        rates = np.array([self.draws[name] * (_FEW_IN_FLIGHT if "in_flight" in name else 1) for name in names])
        shares = np.bincount(rates.argmin(axis=0), minlength=len(names)) / N_DRAWS
        found = {name: float(share) for name, share in zip(names, shares, strict=True) if share}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def scarcest(self) -> str:
        """The ceiling that is the smallest in most of the draws."""
        return next(iter(self.scarcities))

    @property
    def to_cure(self) -> str | None:
        """The scarcest resource beside the GPUs; None if hardly any draw has another."""
        others = {name: share for name, share in self.scarcities.items() if name != "gpu_ceiling"}
        return next((name for name, share in others.items() if share >= _RARE), None)

    @property
    def apart(self) -> list[str]:
        """Ceilings that do not follow from others: not that of requests, if the threads that decode send them."""
        decoders_read = "requests_in_flight_per_gpu" not in self.inputs and self.to_cure != "in_flight_ceiling"
        names = [name for name in RESOURCES if name in self.draws]
        return [name for name in names if not (decoders_read and name == "in_flight_ceiling")]

    def next_ceiling(self) -> Draws:
        """Images/s if the resource to cure were without limit."""
        return np.minimum.reduce([self.draws[name] for name in self.apart if name != self.to_cure])
