"""Data-parallel training: several workers train a model as one worker with the whole batch would.

``options`` is the entry point of a session, ``derivation`` adds the exchanges to a graph, ``connection`` connects workers; each
other module is one feature. PyTorch is imported only on use.
"""

from typing import TYPE_CHECKING

from burnish.lazy_imports import exports

if TYPE_CHECKING:
    from burnish.distributed.connection.communicators import ArrayCommunicator, mpi
    from burnish.distributed.connection.joining import join
    from burnish.distributed.connection.process_group import ProcessGroup
    from burnish.distributed.options import DataParallel

__all__ = ["ArrayCommunicator", "DataParallel", "ProcessGroup", "join", "mpi"]

if not TYPE_CHECKING:  # for a type checker, a module with __getattr__ has every name
    __getattr__, __dir__ = exports(
        __name__,
        {
            "connection.communicators": "ArrayCommunicator mpi",
            "connection.joining": "join",
            "connection.process_group": "ProcessGroup",
            "options": "DataParallel",
        },
    )
