"""From samples to batches on the device."""
