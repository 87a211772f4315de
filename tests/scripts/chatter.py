"""Prints a gigabyte."""

import sys

line = b"x" * (1 << 20)
for _ in range(1024):
    sys.stdout.buffer.write(line)
