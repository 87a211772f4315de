"""Values that every other part speaks in: bytes, devices, workloads, traces. Needs numpy and nothing else."""
