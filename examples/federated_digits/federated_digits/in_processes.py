"""Train the digits over clients that are processes of their own, without Flower.

python -m federated_digits.in_processes --rounds 10

Each client is a command that is run once for each round (``process_client.py``), on digits that no other has.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import burnish
from burnish.federated import ProcessClient, RoundReport, Server, run_rounds
from federated_digits.task import arrays, program
from federated_digits.write_partition import main as write_partition


def clients_of(folder: Path, count: int) -> list[ProcessClient]:
    """Write the partitions of all clients into a folder, and return the clients."""
    clients = []
    for number in range(count):
        partition = folder / str(number)
        partition.mkdir()
        write_partition(number, count, partition)
        command = [sys.executable, "-m", "federated_digits.process_client", str(partition)]
        clients.append(ProcessClient(program(), command, number=number, evaluates=True, timeout=600))
    return clients


def accuracy(server: Server) -> float:
    """The share of all test images that the server's state classifies rightly."""
    with burnish.Session(program(), engine="onnxruntime", state=server.state(), threads=1) as session:
        return session.evaluate(arrays("test"))["accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=5, help="of each client, in each round")
    parser.add_argument("--concurrency", type=int, default=2, help="clients that train at the same time")
    arguments = parser.parse_args()
    server = Server(program())

    def show(report: RoundReport) -> None:
        refused = "".join(f"; without client {number}: {reason}" for number, reason in report.refused.items())
        loss, share = report.metrics["loss"], accuracy(server)
        joined = f"{len(report.joined)} clients, {report.samples} samples, loss {loss:.4f}"
        print(f"round {report.number}: {joined}; {share:.1%} of the test images are classified rightly{refused}", flush=True)

    with tempfile.TemporaryDirectory(prefix="burnish-digits-") as folder:
        clients = clients_of(Path(folder), arguments.clients)
        run_rounds(server, clients, arguments.rounds, epochs=arguments.epochs, concurrency=arguments.concurrency, progress=show)


if __name__ == "__main__":
    main()
