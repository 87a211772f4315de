"""The predictions held against what others measured on real GPUs: ``python benchmarks/prediction``."""
