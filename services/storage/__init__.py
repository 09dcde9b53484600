"""The storage service: owns host-pool segments and the L3 backend with its files. Knows nothing of the tree."""
