"""Functions and a class that test_worker.py runs in forks of the worker."""

import os
import signal
import sys
import time

from memfit.core.errors import UsageError
from memfit.dryrun.worker_child import report_progress


def device():
    import torch

    torch.ones(3, device="cuda")
    return [
        torch.cuda.get_device_name(),
        torch.cuda.mem_get_info()[1],
        list(torch.cuda.get_device_capability()),
    ]


def echo(**arguments):
    return arguments


def pid():
    return os.getpid()


def raises():
    raise ValueError("no such thing")


def raises_usage():
    raise UsageError("give another")


def out_of_memory():
    import torch

    return torch.empty(1 << 42, dtype=torch.uint8, device="cuda")


def killed(name):
    os.kill(os.getpid(), getattr(signal, name))


def exits():
    sys.exit(3)


def leaves():
    os._exit(4)


def prints():
    print("from user code")
    os.write(1, b"straight to the descriptor\n")


def sleeps():
    time.sleep(60)


def counts(to):
    for number in range(to):
        report_progress(number)
    return "done"


class Adder:
    def __init__(self, start):
        self.total = start

    def add(self, number):
        self.total += number
        return self.total

    def pid(self):
        return os.getpid()

    def fail(self):
        raise KeyError("missing")


class Unbuildable:
    def __init__(self):
        raise RuntimeError("cannot be made")
