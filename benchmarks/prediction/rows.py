"""Reading files of rows, and finding who can rebuild them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from memfit.core.errors import InputError
from prediction.case import Case, RowsFile, Source, left_out


def read_files(paths: Iterable[Path]) -> Iterator[RowsFile]:
    """The files, and those of folders.

    Raises:
        InputError: nothing there, or not of the form.
    """
    for path in paths:
        if not path.exists():
            raise InputError(f"{path}: no such file or folder; give a folder of rows, or files")
        for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
            yield read_file(file)


def read_file(path: Path) -> RowsFile:
    """One file: an object with a list under ``rows``, each with ``measured_bytes`` or ``oom``.

    Raises:
        InputError: it is something else.
    """
    try:
        head = json.loads(path.read_text(encoding="utf-8"))
        rows = tuple(head.pop("rows"))
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise InputError(f"{path} is no file of rows: {type(problem).__name__}: {problem}") from problem
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or not (row.get("oom") or isinstance(row.get("measured_bytes"), int)):
            raise InputError(f"{path}: row {number} has neither measured_bytes nor oom")
    return RowsFile(name=path.stem, head=head, rows=rows, traces=path.resolve().parent.parent / "traces")


def cases_of(file: RowsFile, sources: Iterable[Source]) -> tuple[str, list[Case]]:
    """The name of the file's source, and a case for each of its rows; excluded ones where there is none."""
    for source in sources:
        if source.has(file):
            return source.name, source.cases(file)
    return file.name, left_out(file, "no source of this benchmark rebuilds such rows")
