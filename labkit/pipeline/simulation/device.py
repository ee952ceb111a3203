"""What a simulated device can do: its rates, and those that makers publish for theirs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SimulatedDevice:
    """The figures of a device that decide how long its work takes.

    A kernel takes the longer of its floating-point operations by `flops_per_s` and the bytes of its tensors by
    `memory_bytes_per_s`, and never less than `min_kernel_s`; with `kernel_s`, every kernel takes just that.

    Args:
        name: As `torch.cuda.get_device_name` gives it.
        flops_per_s: Floating-point operations per second, in the precision that the work uses.
        memory_bytes_per_s: Of the device's own memory.
        pcie_bytes_per_s: Between page-locked memory of the host and the device, in each direction.
        staging_bytes_per_s: At which the host copies pageable memory into the driver's page-locked buffer.
        memory_bytes: Size of the device's memory.
        launch_s: How long the host is busy with each kernel or copy that it submits.
        min_kernel_s: The shortest kernel.
        kernel_s: The time of every kernel, if it is stated and not reckoned.
        clock_hz: Cycles per second, for `torch.cuda._sleep`.
        source: Where the figures come from.
    """

    name: str = "simulated device"
    flops_per_s: float = 100e12
    memory_bytes_per_s: float = 1e12
    pcie_bytes_per_s: float = 25e9
    staging_bytes_per_s: float = 8e9
    memory_bytes: int = 16 * 2**30
    launch_s: float = 5e-6
    min_kernel_s: float = 2e-6
    kernel_s: float | None = None
    clock_hz: float = 1.5e9
    source: str = ""

    def __post_init__(self) -> None:
        for field in ("flops_per_s", "memory_bytes_per_s", "pcie_bytes_per_s", "staging_bytes_per_s", "clock_hz"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field} must be above 0, got {getattr(self, field)!r}")
        for field in ("launch_s", "min_kernel_s", "memory_bytes"):
            if not getattr(self, field) >= 0:
                raise ValueError(f"{field} must be 0 or more, got {getattr(self, field)!r}")

    def kernel_seconds(self, n_flops: float, n_bytes: float) -> float:
        if self.kernel_s is not None:
            return self.kernel_s
        return max(self.min_kernel_s, n_flops / self.flops_per_s, n_bytes / self.memory_bytes_per_s)
