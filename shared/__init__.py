"""What two services must agree on, and nothing else."""
