"""``burnish doctor``: the engines and tools on this machine."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from burnish.cli.console import echo, output


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show the engines, kernels, compiler, cache and memory of this machine.

    It says what would make burnish faster here.
    """
    from burnish.training.environment import diagnose

    found = diagnose()
    if as_json:
        echo(json.dumps(found, indent=1))
        return
    console = output()
    console.print(f"burnish {found['burnish']}, Python {found['python']}, {found['platform']}")
    console.print(f"processor: {found['cpu']}, {found['level']}, {found['threads']} cores")
    if found["memory_limit"] is not None:
        console.print(f"memory: {found['memory_limit'] / 1e9:.1f} GB")
    for name, engine in found["engines"].items():
        if engine["version"] is None:
            console.print(f"engine {name}: {engine['reason']}")
        else:
            kernels = f"kernels in {engine['kernels']}" if engine["kernels"] else f"no kernels: {engine['reason']}"
            console.print(f"engine {name} (version {engine['version']}): {kernels}")
    console.print(f"compiler: {found['compiler'] or 'none'}")
    console.print(f"cache: {found['cache']}")
    for sentence in found["advice"]:
        console.print(f"advice: {sentence}")
