# fmt: off
from .loader import BatchLoader as BatchLoader
from .crops import flips as flips, middle_crops as middle_crops, random_crops as random_crops, uniforms as uniforms
