"""Data-parallel training: several workers train one model as one worker with the whole batch would.

``options`` is where a session begins, ``derivation`` puts the exchanges into a graph, ``connection`` is how workers meet; each
other module is one feature. Nothing here imports PyTorch before it is used.
"""

from typing import TYPE_CHECKING

from burnish.lazy_imports import exports

if TYPE_CHECKING:
    from burnish.distributed.connection.communicators import ArrayCommunicator, mpi
    from burnish.distributed.connection.joining import join
    from burnish.distributed.connection.process_group import ProcessGroup
    from burnish.distributed.options import DataParallel

__all__ = ["ArrayCommunicator", "DataParallel", "ProcessGroup", "join", "mpi"]

if not TYPE_CHECKING:  # to a type checker a module's __getattr__ has every name
    __getattr__, __dir__ = exports(
        __name__,
        {
            "connection.communicators": "ArrayCommunicator mpi",
            "connection.joining": "join",
            "connection.process_group": "ProcessGroup",
            "options": "DataParallel",
        },
    )
