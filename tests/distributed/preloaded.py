"""What the server of `ranks` loads once, so that its forks need not."""

from importlib import import_module

for name in (
    "torch._dynamo",  # DDP imports it when one is made
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "memfit.distributed.agreement",
    "memfit.distributed.fault_tolerance",
    "memfit.distributed.memory",
    "memfit.distributed.synchronization",
    "memfit.distributed.launching",
    "memfit.planning.plan",
):
    import_module(name)
