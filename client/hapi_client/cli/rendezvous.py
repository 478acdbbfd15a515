"""``hapi rendezvous``: where workers that train together find each other."""

from __future__ import annotations

import signal
from typing import Annotated

import typer


def rendezvous_command(
    address: Annotated[
        str,
        typer.Argument(
            help="Address to listen on, which all workers reach.",
            metavar="HOST:PORT",
        ),
    ],
) -> None:
    """Keep the address book of workers that train together.

    Workers that name it (HAPI_RENDEZVOUS, hapi train --rendezvous) join the
    run between two steps, and may end at any time. It keeps some kilobytes
    and does no work: run it on a machine that stays, until Ctrl-C or
    SIGTERM. One rendezvous is for one run. It has no password: like
    torchrun's, it is for a network whose machines trust each other.

    Example:

        hapi rendezvous trainer-1:29400

        HAPI_RENDEZVOUS=trainer-1:29400 python train.py
    """
    # torch takes seconds to import.
    from hapi_training.store import open_store

    store = open_store(address)
    typer.echo(
        f"workers may join: HAPI_RENDEZVOUS={address} (store on port "
        f"{store.port})"
    )
    signal.pause()
