from .loader import BatchLoader as BatchLoader
