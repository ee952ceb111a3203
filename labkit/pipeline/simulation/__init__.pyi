# fmt: off
from .context import simulated_cuda as simulated_cuda
from .device import SimulatedDevice as SimulatedDevice
from .loader import SimulatedLoader as SimulatedLoader
from .simulation import Simulation as Simulation, is_simulated as is_simulated
