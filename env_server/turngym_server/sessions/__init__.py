"""Episodes in play: their leases, each turn exactly once, and the digests that tell them apart."""
