"""A run of a recording over arrays, with the results of `memfit.allocators.running.CachingRun`."""

from __future__ import annotations

from dataclasses import replace

from memfit.allocators.base import OutOfMemory
from memfit.allocators.fast import fields as f
from memfit.allocators.fast.engine import Engine
from memfit.allocators.running import CachingRun, Run


class ArrayRun(CachingRun):
    """Begins as any run does, then goes through the events on arrays."""

    _engine: Engine | None = None

    def _events(self) -> None:
        program = self._program
        count = self._until + 1
        engine = self._engine = Engine(
            self._allocator,
            program.events,
            chunks=self._chunks,
            known=self._places.known,
            exact=self._exact,
            kept_after=program.last_allocation,
            detailed=self._detailed,
        )
        kept = self._layouts_at
        at = 0
        for stop in sorted({*(event + 1 for event in kept if 0 <= event < count), count}):
            while at < stop and not self._ended:
                failed, at = engine.run(at, stop)
                self._last = at - 1
                if failed:
                    self._failed()
            if not self._ended and stop - 1 in kept:
                self._keep_layout(stop - 1)

    def _failed(self) -> None:
        """Note that the last event ran out of memory; nothing has changed since."""
        engine, allocator, index = self._engine, self._allocator, self._last
        assert engine is not None
        failure = OutOfMemory(
            requested_bytes=int(self._program.events.size_bytes[index]),
            reserved_bytes=engine.number(f.RESERVED),
            limit_bytes=allocator.config.total_bytes
            if allocator.limit_bytes is None
            else allocator.limit_bytes,
            allocated_bytes=engine.number(f.LARGE + f.BYTES) + engine.number(f.SMALL + f.BYTES),
        )
        stream = int(self._program.events.stream[index])
        self._fail(index, failure.requested_bytes, stream, failure, engine.number(f.RESERVED_BEFORE))

    def _live_bytes(self) -> int:
        if self._engine is None:
            return super()._live_bytes()
        return self._engine.number(f.LARGE + f.ASKED) + self._engine.number(f.SMALL + f.ASKED)

    def _keep_layout(self, index: int) -> None:
        if self._engine is not None:
            self._chunks = self._engine.store()
        super()._keep_layout(index)

    def _result(self) -> Run:
        engine = self._engine
        if engine is None:
            return super()._result()
        self._chunks = engine.store()
        totals = engine.columns.totals[: self._last + 1]
        return replace(
            super()._result(),
            placements=engine.placements,
            reserved_changes=engine.changes,
            live_bytes=totals[:, 0],
            allocated_bytes=totals[:, 1],
            reserved_bytes=totals[:, 2],
            same_places=engine.number(f.SAME) if self._detailed else 0,
            compared_places=engine.number(f.COMPARED) if self._detailed else 0,
        )
