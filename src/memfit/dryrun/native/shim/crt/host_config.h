// Empty on purpose: no CUDA compiler is involved, so there is no host compiler to check.
