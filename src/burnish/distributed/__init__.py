"""Several workers that train one model as one worker with the whole batch would: how they are one, what they exchange, and when.

From a program and the number of workers follows the graph that each worker runs (``graphs``): the same on all, with
collectives as semantic operators in one fixed order. How workers meet, and what happens when one is gone, lives here too
(``connection``); what runs the graph is an engine, which gets the connection as a ``Communicator``. ``runners`` stand around the
engine's own where workers hold different parts of the state. ``options`` puts all of it together.

Nothing here reads data or keeps a run, and nothing imports PyTorch before it is used.
"""

from typing import TYPE_CHECKING

from burnish.exports import exports

if TYPE_CHECKING:
    from burnish.distributed.connection.arrays import ArrayCommunicator, mpi
    from burnish.distributed.connection.joining import join
    from burnish.distributed.connection.process_group import ProcessGroup
    from burnish.distributed.options import DataParallel

__all__ = ["ArrayCommunicator", "DataParallel", "ProcessGroup", "join", "mpi"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "connection.arrays": "ArrayCommunicator mpi",
        "connection.joining": "join",
        "connection.process_group": "ProcessGroup",
        "options": "DataParallel",
    },
)
