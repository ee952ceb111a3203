"""What it costs: timing, results, plots. Knows nothing of images."""
