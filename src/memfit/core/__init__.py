"""Values that every other part speaks in: bytes, devices, workloads, traces. Standard library and numpy only."""
