"""The caching allocator over arrays: the rules of `memfit.allocators.caching`, for numba to compile.

One source: every function here is plain Python over numpy arrays, and runs as such without numba. The state
of an allocator is loaded from a `CachingAllocator`, run through events, and stored back, so that whatever
looks at an allocator (layouts, statistics, reports) knows only that one. Tests compare the two on every rule.

Nothing here makes an array or any other object: so numba need not count references (``_nrt=False``), which
took more time than all the rest.
"""
