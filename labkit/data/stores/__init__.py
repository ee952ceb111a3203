"""Where encoded images lie: folders, servers, buckets, simulated disks. A store yields bytes by key."""
