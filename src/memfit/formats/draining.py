"""Reading a snapshot's pickle while its events, which are nearly all of it, are packed away as they come.

As dictionaries, the events of a history take seven times their size in the file. The unpickler asks the
file for more every 64 KiB or so, and is at rest then: what its lists of events have by now is taken out of
them and put into columns. A pickle may say "that dictionary again" of an event that was packed and emptied;
PyTorch's never do. Such a file is `Unusual`, and is read again as a whole.
"""

from __future__ import annotations

import gc
from typing import IO, Any

from memfit.formats.packed_events import PackedEvents, Unusual

STEP_BYTES = 256 << 10
_STEPS_TO_FILL = 64
_MOST_EMPTY = 1024


class DrainingFile:
    """A file for an unpickler, that drains the lists of events which the unpickler fills from it.

    The lists are found among the containers that Python's garbage collector lists as new. It must be switched
    off, and nothing else may make many containers meanwhile: this is for a process that does nothing else.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file: Any = file
        self._since = 0
        self._step = 0
        self._empty: list[tuple[int, list[Any]]] = []
        self._found: list[tuple[list[Any], PackedEvents]] = []
        gc.freeze()

    def read(self, size: int = -1) -> bytes:
        """As the file's."""
        content: bytes = self._file.read(size)
        self._took(len(content))
        return content

    def readinto(self, buffer: Any) -> int:
        """As the file's."""
        count: int = self._file.readinto(buffer)
        self._took(count)
        return count

    def readline(self) -> bytes:
        """As the file's."""
        line: bytes = self._file.readline()
        self._took(len(line))
        return line

    def peek(self, size: int = 0) -> bytes:
        """As the file's."""
        content: bytes = self._file.peek(size)
        return content

    def finish(self, value: Any) -> Any:
        """The value that was read, with its lists of events replaced by what was packed.

        Raises:
            Unusual: events were packed that are not a device's.
        """
        self._drain()
        traces: Any = value.get("device_traces") if isinstance(value, dict) else None
        packed = {id(events): columns for events, columns in self._found}
        if packed and type(traces) is not list:
            raise Unusual("events outside of device_traces")
        for index, events in enumerate(traces or ()):
            columns = packed.get(id(events))
            if columns is not None:
                traces[index] = columns
        placed = {id(trace) for trace in traces or ()}
        if any(id(columns) not in placed for columns in packed.values()):
            raise Unusual("events outside of device_traces")
        return value

    def _took(self, count: int) -> None:
        self._since += count
        if self._since >= STEP_BYTES:
            self._since = 0
            self._step += 1
            self._look()
            self._drain()

    def _look(self) -> None:
        """Find lists of events: among the new ones, and among those that were empty when they were new."""
        new = [one for one in gc.get_objects(generation=0) if type(one) is list]
        gc.freeze()
        waiting, self._empty = self._empty, []
        for step, one in waiting:
            self._sort(step, one)
        for one in new:
            self._sort(self._step, one)

    def _sort(self, step: int, one: list[Any]) -> None:
        if not one:
            if self._step - step < _STEPS_TO_FILL and len(self._empty) < _MOST_EMPTY:
                self._empty.append((step, one))
        elif type(one[0]) is dict and "action" in one[0]:
            self._found.append((one, PackedEvents()))

    def _drain(self) -> None:
        for events, columns in self._found:
            if events:
                for event in events:
                    columns.take(event)
                events.clear()
