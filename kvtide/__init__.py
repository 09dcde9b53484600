"""The command line, the local supervisor, replay and simulation."""
