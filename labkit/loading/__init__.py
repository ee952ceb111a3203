"""From images to batches on the device: loaders, seeds, resume, augmentation, prefetch."""
