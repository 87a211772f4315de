"""memfit: know, plan and prove the GPU memory of a PyTorch job before a GPU is rented."""

__version__ = "0.1.0"
