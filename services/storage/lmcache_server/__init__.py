"""An LMCache server with a module of ours. Runs in LMCache's own environment: see `make lmcache`."""
