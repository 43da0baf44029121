"""Machines for tests: two network namespaces and a link between them, which can be cut."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import uuid

CLONE_NEWNET = 0x40000000
FIRST = "10.213.77.1"


def command(*words: str) -> bool:
    """Run a command; returns whether it succeeded."""
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


class Link:
    """Two network namespaces and the cable between them."""

    def __init__(self) -> None:
        self.machines = [f"burnish-{uuid.uuid4().hex[:6]}-{rank}" for rank in range(2)]

    def lay(self) -> bool:
        """Return whether this machine lets us."""
        if shutil.which("ip") is None or not all(command("ip", "netns", "add", name) for name in self.machines):
            return False
        first, second = self.machines
        laid = command("ip", "-n", first, "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", second)
        for rank, name in enumerate(self.machines):
            laid = laid and command("ip", "-n", name, "addr", "add", f"10.213.77.{rank + 1}/24", "dev", "wire")
            laid = laid and command("ip", "-n", name, "link", "set", "wire", "up")
            laid = laid and command("ip", "-n", name, "link", "set", "lo", "up")
        return laid

    def cut(self) -> None:
        assert command("ip", "-n", self.machines[1], "link", "set", "wire", "down")

    def mend(self) -> None:
        assert command("ip", "-n", self.machines[1], "link", "set", "wire", "up")

    def delay(self, milliseconds: int) -> bool:
        """Delay what goes in one direction; returns whether this machine can."""
        return command(
            "ip",
            "netns",
            "exec",
            self.machines[0],
            "tc",
            "qdisc",
            "add",
            "dev",
            "wire",
            "root",
            "netem",
            "delay",
            f"{milliseconds}ms",
        )

    def remove(self) -> None:
        for name in self.machines:
            command("ip", "netns", "delete", name)


def enter(name: str) -> None:
    """Let this process, which has one thread, be on a machine; the workers meet on the first one."""
    with open(f"/run/netns/{name}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    os.environ["MASTER_ADDR"] = FIRST
