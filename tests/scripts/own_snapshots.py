"""Records and dumps snapshots and resets peaks by itself, and sees what it would see without memfit."""

import pickle

import torch

model = torch.nn.Linear(1024, 1024, device="cuda")
big = torch.empty(1 << 26, device="cuda")
del big
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats()
torch.cuda.reset_accumulated_memory_stats()
assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated() < 1 << 26
torch.cuda.memory._record_memory_history(max_entries=1000)
x = torch.empty(1 << 20, device="cuda")
del x
torch.cuda.memory._record_memory_history(enabled=None)
y = torch.empty(1 << 20, device="cuda")
torch.cuda.memory._dump_snapshot("own.pickle")
with open("own.pickle", "rb") as file:
    events = pickle.load(file)["device_traces"][0]
assert [event["action"] for event in events if not event["action"].startswith("segment")] == [
    "alloc",
    "free_requested",
    "free_completed",
], events
