"""What runs where the data is."""

from __future__ import annotations

import shlex

from flwr.app import Context

import burnish.federated
from burnish.federated.flower import client_app
from federated_digits.task import batches, partition, program


def make(context: Context) -> burnish.federated.Client:
    """The client of a node, with the digits of its partition; or a command, where the node's configuration has one."""
    number = int(context.node_config["partition-id"])
    if command := str(context.node_config.get("command", "")):
        return burnish.federated.ProcessClient(program(), shlex.split(command), number=number, evaluates=True)
    clients = int(context.run_config["clients"])
    train, test = (partition(number, clients, split) for split in ("train", "test"))
    evaluation = [test] if len(test["labels"]) else None
    return burnish.federated.client(
        program(), lambda epoch: batches(train, epoch), evaluation, number=number, engine="onnxruntime", threads=1
    )


app = client_app(make)
