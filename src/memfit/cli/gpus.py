"""`memfit gpus`: the catalogue as a table, or with every figure's source as JSON."""

from __future__ import annotations

from typing import Annotated

import typer

from memfit.cli.console import print_json, show


def gpus(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, with the source of each figure.")
    ] = False,
) -> int:
    """List the GPUs that memfit knows by name.

    Any other GPU can be described: --gpu 24GiB,sm89.
    """
    from memfit.reports import catalogue

    if as_json:
        print_json(catalogue.catalogue_json())
    else:
        show(catalogue.catalogue_table())
    return 0
