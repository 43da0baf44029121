"""Memory of a session: the allocator that keeps its pages, and what is never there twice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import burnish
from burnish.data.random_data import random_batches
from burnish.engines.base import HandedOver
from burnish.engines.torch import TorchEngine
from burnish.engines.torch import native as kernels
from burnish.engines.torch.runtime import memory
from burnish.engines.torch.translate.translation import translate
from oracles.kernel_graphs import kernel_graphs
from oracles.open_program import open_program
from oracles.small_networks import perceptron, transformer

needs_kernels = pytest.mark.skipif(not kernels.available(), reason="needs a C++ compiler for the fused kernels")

# Each in a process of its own, whose allocator has served nothing before.
CONTENTS = """
import random, torch
from burnish.engines.torch.runtime import memory
memory.keep_pages().__enter__()
random.seed(3)
held = {}
for turn in range(3000):
    slot = random.randrange(40)
    if slot in held:
        tensor, value = held.pop(slot)
        assert (tensor == value).all(), slot
    held[slot] = torch.full((random.randrange(1, 900_000),), float(turn)), float(turn)
for tensor, value in held.values():
    assert (tensor == value).all()
kept = torch.ones(1 << 20)
kept.resize_(1 << 21)
assert kept[: 1 << 20].sum() == 1 << 20
torch.nn.functional.conv2d(torch.randn(2, 64, 32, 32), torch.randn(64, 64, 3, 3))
"""

GROWTH = """
import resource, torch
from burnish.engines.torch.runtime import memory
memory.keep_pages().__enter__()
def step(size):
    whole = [torch.ones(size, 1 << 20) for _ in range(4)]
    return sum(float(tensor[0, 0]) for tensor in whole)
for size in (8, 3, 5):
    step(size)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for turn in range(60):
    step((8, 3, 5, 7)[turn % 4])
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000
"""


EXHAUSTED = """
import torch
from burnish.engines.torch.runtime import memory
memory.keep_pages().__enter__()
for size in (1 << 38, 1 << 56):
    try:
        torch.empty(size)
    except RuntimeError as error:
        assert "out of memory: a tensor of" in str(error) or "allocate memory" in str(error) or "overflow" in str(error), error
    else:
        raise AssertionError(size)
assert torch.ones(1 << 20).sum() == 1 << 20
"""


BESIDE = """
import os, threading, torch
from burnish.engines.torch.runtime import memory
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")
class Owner: pass
used = memory.allocator().burnish_in_use
before = torch.ones(1 << 22)
owner = Owner()
pages = memory.keep_pages(owner)
assert used() == 0
with pages:
    served = [torch.ones(1 << 22) for _ in range(8)]
    held = used()
    assert held == 8 << 24, held
    taken = []
    thread = threading.Thread(target=lambda: taken.append(torch.ones(1 << 22)))
    thread.start()
    thread.join()
    del before, taken[:]
    assert used() == held
beside = torch.ones(1 << 22)
assert used() == held
thread = threading.Thread(target=served.clear)
thread.start()
thread.join()
assert used() == 0
kept = resident()
with pages:
    again = torch.ones(1 << 22)
    assert used() == 1 << 24
del owner
assert kept - resident() > 6 << 24, (kept, resident())
assert again.sum() == beside.sum() == 1 << 22
del again
assert used() == 0 and kept - resident() > 7 << 24
with memory.keep_pages():
    assert torch.ones(1 << 25).sum() == 1 << 25
"""

OF_DATA = """
import resource, torch
from burnish.engines.torch.runtime import memory
pages = memory.keep_pages()
used = int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) << 10
resource.setrlimit(resource.RLIMIT_DATA, (used + (512 << 20), resource.RLIM_INFINITY))
with pages:
    try:
        held = [torch.ones(1 << 24) for _ in range(16)]
    except RuntimeError as error:
        assert "out of memory: a tensor of 67108864 bytes" in str(error) and "ulimit -d" in str(error), error
    else:
        raise AssertionError("no limit")
    assert torch.ones(1 << 24).sum() == 1 << 24
"""


@needs_kernels
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts the pages of a process as Linux does")
@pytest.mark.parametrize(
    "script",
    [CONTENTS, *(pytest.param(script, marks=pytest.mark.slow) for script in (GROWTH, EXHAUSTED, BESIDE, OF_DATA))],
    ids=["contents", "growth", "exhausted", "beside", "limit of data"],
)
@pytest.mark.slow
def test_tensors_of_the_keeping_allocator(script):
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@needs_kernels
def test_a_session_serves_its_own_tensors_alone():
    program = burnish.compile(perceptron(), optimizer="adam")
    used = memory.allocator().burnish_in_use
    with burnish.Session(program, engine="torch") as session:
        session.step(batch_of(program))
        before = used()
        tensor = torch.ones(1 << 22)
        assert used() == before
        del tensor
        session.evaluate(batch_of(program))
        session.load_state(session.state())
        assert used() == before
    runner = open_program(TorchEngine(keep_pages=False), program, program.initial_state())
    assert not isinstance(runner._memory, memory.KeptPages)


def batch_of(program):
    return next(random_batches(program))


MIB = 1 << 20
MOUNTS = {
    2: "30 23 0:26 {shown} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n",
    1: "30 23 0:26 {shown} /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory\n",
}


def system(folder, version, group, groups, *, shown="/", available=64 << 30, swap=0):
    """The files of a system whose control groups have these files, by their folder below the mount, as memory_left reads them."""
    mount = folder / "sys/fs/cgroup" / ("memory" if version == 1 else "")
    for name, files in groups.items():
        place = mount / name
        place.mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            lines = [f"{key} {number}\n" for key, number in content.items()] if isinstance(content, dict) else [f"{content}\n"]
            (place / file).write_text("".join(lines))
    own = folder / "proc/self"
    own.mkdir(parents=True)
    line = f"0::{group}\n" if version == 2 else f"9:cpu,cpuacct:/other\n4:memory:{group}\n0::/elsewhere\n"
    (own / "cgroup").write_text(line)
    (own / "mountinfo").write_text("22 1 0:2 / / rw - ext4 /dev/root rw\n" + MOUNTS[version].format(shown=shown))
    (folder / "proc/meminfo").write_text(
        f"MemTotal: 99999999 kB\nMemAvailable: {available >> 10} kB\nSwapFree: {swap >> 10} kB\n"
    )
    return str(folder)


def second(limit, used, **stat):
    return {"memory.max": limit, "memory.current": used, "memory.stat": stat}


def first(limit, used, **stat):
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat}


UNLIMITED = 9223372036854771712
GROUPS = {
    "v2": (2, "/job", {"": {}, "job": second(2048 * MIB, 500 * MIB)}, {}, 1548, "job"),
    "v2, no limit": (2, "/job", {"": {}, "job": second("max", 500 * MIB)}, {"available": 3 << 30}, 3072, "machine"),
    "v2, the tightest is around it": (
        2,
        "/a/b/c",
        {"a": second(900 * MIB, 700 * MIB), "a/b": second("max", 600 * MIB), "a/b/c": second(2048 * MIB, 100 * MIB)},
        {},
        200,
        "cgroup/a",
    ),
    "v2, files that can be read again": (
        2,
        "/job",
        {"job": second(1000 * MIB, 900 * MIB, inactive_file=300 * MIB, active_file=200 * MIB, file_mapped=100 * MIB)},
        {},
        500,
        "job",
    ),
    "v2, swap": (
        2,
        "/job",
        {"job": {**second(1000 * MIB, 900 * MIB), "memory.swap.max": 400 * MIB, "memory.swap.current": 100 * MIB}},
        {"swap": 8 << 30},
        400,
        "job",
    ),
    "v2, no swap allowed": (
        2,
        "/job",
        {"job": {**second(1000 * MIB, 900 * MIB), "memory.swap.max": 0, "memory.swap.current": 0}},
        {"swap": 8 << 30},
        100,
        "job",
    ),
    "v2, a container with a view of its own": (2, "/", {"": second(2048 * MIB, 48 * MIB)}, {}, 2000, "cgroup"),
    "v2, the machine has less": (2, "/job", {"job": second(9000 * MIB, 0)}, {"available": 77 * MIB}, 77, "machine"),
    "v2, over the limit": (2, "/job", {"job": second(100 * MIB, 200 * MIB)}, {}, 0, "job"),
    "v1": (1, "/job", {"": first(UNLIMITED, 0), "job": first(2048 * MIB, 500 * MIB)}, {}, 1548, "limit_in_bytes"),
    "v1, a container that sees the machine's names": (
        1,
        "/docker/f00",
        {"": first(2048 * MIB, 500 * MIB, total_inactive_file=100 * MIB)},
        {"shown": "/docker/f00"},
        1648,
        "limit_in_bytes",
    ),
    "v1, around it and not to be seen": (
        1,
        "/job",
        {"": first(UNLIMITED, 0), "job": first(UNLIMITED, 500 * MIB, hierarchical_memory_limit=700 * MIB)},
        {},
        200,
        "limit_in_bytes",
    ),
    "v1, memory and swap": (
        1,
        "/job",
        {
            "job": {
                **first(1000 * MIB, 900 * MIB),
                "memory.memsw.limit_in_bytes": 1200 * MIB,
                "memory.memsw.usage_in_bytes": 950 * MIB,
            }
        },
        {"swap": 8 << 30},
        250,
        "memsw",
    ),
    "v1, without swapping": (
        1,
        "/job",
        {"job": {**first(1000 * MIB, 900 * MIB), "memory.swappiness": 0}},
        {"swap": 8 << 30},
        100,
        "limit_in_bytes",
    ),
}


@needs_kernels
@pytest.mark.parametrize("case", GROUPS)
def test_what_is_left_below_the_limits_of_control_groups(case, tmp_path):
    version, group, groups, options, expected, of = GROUPS[case]
    left = memory.memory_left(system(tmp_path, version, group, groups, **options))
    assert left.size == expected * MIB, left
    assert of in left.of


LIMITED = """
import os, sys
open(os.path.join(sys.argv[1], "cgroup.procs"), "w").write(str(os.getpid()))
import numpy as np, burnish
from burnish.models import residual_network
program = burnish.compile(residual_network(width=32, blocks=(1, 1)), optimizer="sgd")
session = burnish.Session(program, engine="torch", threads=1)
entry = next(entry for entry in program.signature["step"].inputs if entry.role is burnish.program.Role.DATA)
def step(samples):
    x = np.zeros([samples, *entry.extents[1:]], np.float32)
    return session.step({entry.name: x, "labels": np.zeros(samples, np.int64)})
step(2)
state = session.state()
try:
    step(int(sys.argv[2]))
except burnish.errors.EngineError as error:
    print(error)
assert all(np.array_equal(array, state[name]) for name, array in session.state().items())
step(2)
print("went on")
"""


@pytest.fixture
def limited_group():
    """The folder of a control group below this process's own that may use 700 MiB, or the test is skipped."""
    version_one = "/sys/fs/cgroup/memory"
    lines = Path("/proc/self/cgroup").read_text().splitlines() if Path("/proc/self/cgroup").exists() else []
    own = {line.split(":")[1]: line.split(":")[2] for line in lines}
    top, group = (version_one, own["memory"]) if "memory" in own else ("/sys/fs/cgroup", own.get("", "/"))
    folder = Path(top + group) / f"burnish-test-{os.getpid()}"
    try:
        folder.mkdir()
        try:
            limit = "memory.limit_in_bytes" if top == version_one else "memory.max"
            (folder / limit).write_text(str(700 << 20))
        except OSError:
            folder.rmdir()
            raise
    except OSError as error:
        pytest.skip(f"needs a control group of its own, and the system says: {error}")
    yield folder
    folder.rmdir()


@needs_kernels
@pytest.mark.slow
def test_a_step_that_is_too_large_for_its_control_group_is_an_error(limited_group):
    command = [sys.executable, "-c", LIMITED, str(limited_group), str(1 << 15)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    assert "out of memory: a tensor of" in done.stdout
    assert limited_group.name in done.stdout
    assert "No state has changed. Memory ran out: use a smaller batch" in done.stdout
    assert done.stdout.endswith("went on\n")


def test_a_state_that_is_handed_over_is_taken_entry_by_entry():
    program = burnish.compile(perceptron(), optimizer="adam")
    state = program.initial_state()
    given = HandedOver(state)
    runner = open_program(TorchEngine(), program, given)
    assert not given
    kept = dict(state)
    other = open_program(TorchEngine(), program, kept)
    assert kept.keys() == state.keys()
    for found in (runner.state(), other.state()):
        for name, array in state.items():
            np.testing.assert_array_equal(found[name], array)
            assert not np.shares_memory(found[name], array)


def test_a_session_leaves_the_state_that_it_is_given():
    program = burnish.compile(perceptron(), optimizer="adam")
    state = HandedOver(program.initial_state())
    with burnish.Session(program, engine="torch", state=dict(state)) as session:
        for name, array in session.state().items():
            np.testing.assert_array_equal(state[name], array)


@pytest.mark.slow
def test_the_gradient_of_an_embedding_is_added_up_where_it_lies():
    program = burnish.compile(transformer(), optimizer="adam")
    model = kernel_graphs(program, {"GatherGrad"}, ("grad",))["grad"]
    calls = [node.target for node in translate(model, torch.device("cpu")).graph.nodes]
    assert "index_add_" in calls
    assert torch.index_add not in calls
