"""What runs on the server: it samples clients, joins what they send, and writes a model that any runtime loads."""

from __future__ import annotations

import json
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

import burnish
from burnish.federated import Server, Sharing
from burnish.federated.flower import Strategy
from federated_digits.task import arrays, program

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    server = Server(program(), str(config["optimizer"]), sharing=Sharing(norm=config["norm"]))
    strategy = Strategy(server, {"epochs": int(config["epochs"])}, min_available_nodes=int(config["available"]))
    result = strategy.start(grid=grid, num_rounds=int(config["rounds"]))
    with burnish.Session(program(), engine="onnxruntime", state=server.state()) as session:
        central = session.evaluate(arrays("test"))
    last = max(result.evaluate_metrics_clientapp)
    print(f"all test images at once: {central['accuracy']:.4f}; over the clients: {result.evaluate_metrics_clientapp[last]}")
    if config["result"]:
        folder = Path(str(config["result"]))
        server.save(folder)
        server.export(folder / "digits.onnx")
        joined = {number: list(report.joined) for number, report in strategy.reports.items()}
        (folder / "result.json").write_text(json.dumps({"central": central, "joined": joined}))
