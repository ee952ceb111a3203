"""Images decoded and resized once, then read from one memory-mapped file."""
