"""From keys and bytes to pixels: stores, archives, shards, decoders, stored pixels, sizes."""
