"""See what a training waits for, say why, and try what would help."""
