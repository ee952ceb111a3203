"""Photos and depth pairs to experiment on, made here or downloaded."""
