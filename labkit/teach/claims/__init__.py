"""The write-ups' claims, held against runs of this machine."""
