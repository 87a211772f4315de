"""The caching allocator over arrays: the rules of `memfit.allocators.caching`, compiled by numba where it is.

One source: every function here is plain Python over numpy arrays, and runs as such without numba. The state of
an allocator is loaded from a `CachingAllocator`, run through events, and stored back, so that whatever looks at
an allocator (layouts, statistics, reports) knows only that one. Tests compare the two on every rule.
"""
