"""Where bytes lie on a device: regions, buffers, paged caches, shuffled shards."""
