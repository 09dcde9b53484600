"""The models that a worker runs: configuration, weights and the forward pass over a paged KV pool."""
