"""Federated learning: clients train on their own data, and a server combines their states.

``sharing``  the shared state, and its combination
``messages``  messages between server and client, in memory and as files
``client``, ``other_process``  clients: a session here, or a program in any language
``server``, ``server_optimizer``  the server
``rounds``  rounds in this process
``flower``  the same under Flower: a ClientApp, and a strategy for its server
"""

from __future__ import annotations

from burnish.federated.client import Client, client
from burnish.federated.messages import Evaluation, Round, Update
from burnish.federated.other_process import ProcessClient
from burnish.federated.rounds import run_rounds
from burnish.federated.server import RoundReport, Server
from burnish.federated.sharing import Sharing

__all__ = [
    "Client",
    "Evaluation",
    "ProcessClient",
    "Round",
    "RoundReport",
    "Server",
    "Sharing",
    "Update",
    "client",
    "run_rounds",
]
