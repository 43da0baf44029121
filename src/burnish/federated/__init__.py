"""Federated learning: clients train where their data is, and a server makes one state of what they have learned.

``sharing``  which state travels, and how it is joined
``messages``  what goes between server and client, in memory and as files
``client``, ``other_process``  who trains: a session here, or a program of any language
``server``, ``server_optimizer``  who joins
``rounds``  rounds in this process
``flower``  the same under Flower: its ClientApp, and a strategy for its server
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
