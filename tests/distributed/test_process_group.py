"""The workers of a run: what they exchange, and the errors that end every wait."""

import os
import re
import signal
import socket
import sys
import time

import pytest
import torch
from worker_processes import Workers, free_port, run, tell

from burnish.distributed.connection import store
from burnish.distributed.connection.joining import join
from burnish.distributed.connection.process_group import ProcessGroup
from burnish.errors import ConfigurationError, EngineError, InputError, WorkerError
from burnish.installing import install_command
from oracles.combinations import diagonal, named, spread


def _exchanges(rank):
    with join(timeout=600, first_contact=600) as group:
        summed = group.all_reduce(torch.tensor([rank, 2.0], dtype=torch.float64))
        gathered = group.all_gather(torch.full((2,), rank))
        largest = group.all_reduce(torch.tensor(float(rank)), "max")
        told = group.all_gather_json({"rank": rank, "list": [1] * rank})
        content = group.all_gather_bytes(b"\0" * rank)
        source = group.broadcast(torch.tensor([rank]), source=1)
        part = group.split(2)
        in_part = part.broadcast(part.all_reduce(torch.tensor([rank + 1])), source=0)
        group.barrier()
        return [
            group.rank,
            group.world_size,
            summed.tolist(),
            [entry.tolist() for entry in gathered],
            largest.item(),
            told,
            content,
            source.item(),
            (part.rank, part.world_size, in_part.item()),
            group.split(3) is group,
        ]


SHARING = pytest.mark.parametrize("share", ["on", "off"], ids=["by memory", "by Gloo"])


@pytest.mark.slow
@SHARING
def test_every_exchange_has_the_values_of_all_ranks(share):
    results = run(_exchanges, 3, environment={"BURNISH_SHARED_MEMORY": share})
    told = [{"rank": rank, "list": [1] * rank} for rank in range(3)]
    same = [3, [3.0, 6.0], [[0, 0], [1, 1], [2, 2]], 2.0, told, [b"", b"\0", b"\0\0"], 1]
    parts = [(0, 2, 3), (1, 2, 3), (0, 1, 3)]
    for rank, result in enumerate(results):
        assert result == [rank, *same, parts[rank], True]


def _groups_of_groups(rank, size):
    with join(timeout=600, first_contact=600) as group:
        part = group.split(size)
        groups = [part, group.twin(), part.twin(), part.split(2), group.apart(2), group.twin()]
        return [made.all_reduce(torch.tensor([10**rank])).item() for made in groups]


@pytest.mark.slow
@diagonal((("workers", "size"), [(3, 2), (4, 3), (5, 4)]), ("share", named(["on", "off"], ["by memory", "by Gloo"])))
def test_groups_are_made_of_workers_that_are_of_different_numbers_of_groups(workers, size, share):
    def total(first, count):
        return sum(10**rank for rank in range(first, min(first + count, workers)))

    for rank, found in enumerate(run(_groups_of_groups, workers, size, environment={"BURNISH_SHARED_MEMORY": share})):
        first = rank // size * size
        inner = first + (rank - first) // 2 * 2
        part, everyone = total(first, size), total(0, workers)
        in_part = sum(10**other for other in range(inner, min(inner + 2, first + size, workers)))
        assert found == [part, everyone, part, in_part, total(rank // 2 * 2, 2), everyone]


def test_a_worker_alone_needs_nobody(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    group = join()
    assert (group.rank, group.world_size) == (0, 1)
    tensor = torch.tensor([3.0])
    assert group.all_reduce(tensor) is tensor
    (gathered,) = group.all_gather(tensor)
    assert gathered is not tensor
    assert gathered.tolist() == group.broadcast(tensor).tolist() == [3.0]
    assert group.all_gather_bytes(b"a") == [b"a"]
    assert group.all_gather_json([1]) == [[1]]
    assert group.split(1) is group
    group.barrier()
    group.check()
    group.fail(ValueError("no one to tell"))
    group.close()


def _loses_one(rank, how, patience):
    group = join(timeout=patience, first_contact=600)
    group.barrier()
    tell("joined")
    if rank == 1:
        if how == "error":
            error = ValueError("label 12 is out of range")
            group.fail(error)
            raise error
        if how == "leave":
            group.close()
            return None
        time.sleep(3600)
    try:
        group.all_reduce(torch.ones(3), name="gradients")
    except WorkerError as error:
        group.close()
        return str(error)
    return "went on"


@pytest.mark.slow
@SHARING
@spread(
    ("how", "cause", "patience"),
    [
        # Found out long before the time of an exchange is over.
        ("kill", r"Rank 1 of 3 \(.+, process {process}\) is gone\. Rank {rank} stops too: resume from the last", 3000.0),
        ("error", r"Rank 1 stopped: label 12 is out of range\. Rank {rank} stops too", 3000.0),
        ("leave", r"Rank 1 of 3 \(.+\) left the run before this one\. Rank {rank} stops too", 3000.0),
        (
            "sleep",
            r"The all-reduce of gradients is not done after 4 s: rank 1 of 3 \(.+\) has not come to it\. Rank {rank} st",
            4.0,
        ),
        ("stop", r"[Rr]ank 1 of 3 \(.+\) (shows|has shown) no sign of life.* Rank {rank} stops too", 4.0),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isalpha() else "",
    test_all=3,
)
def test_every_worker_names_the_rank_that_is_gone_or_late(how, cause, patience, share):
    with Workers(_loses_one, 3, how, patience, environment={"BURNISH_SHARED_MEMORY": share}) as workers:
        for rank in range(3):
            workers.message(rank)
        if how in ("kill", "stop"):
            os.kill(workers.processes[1].pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        workers.processes[0].join(600)
        workers.processes[2].join(600)
        assert (workers.processes[0].exitcode, workers.processes[2].exitcode) == (0, 0), "they wait for rank 1"
        if how in ("sleep", "stop"):
            workers.processes[1].kill()
        outcomes = workers.outcomes()
    for rank in (0, 2):
        assert outcomes[rank].value is not None, outcomes[rank].error
        text = outcomes[rank].value
        assert re.search(cause.format(rank=rank, process=workers.processes[1].pid), text), text


def _waits_at_a_barrier(rank):
    group = join(timeout=3000, first_contact=600)
    group.barrier()
    tell("joined")
    if rank == 1:
        time.sleep(3600)
    try:
        group.barrier(name="the checkpoint")
    except WorkerError as error:
        group.close()
        return str(error)


@pytest.mark.slow
def test_who_waits_at_a_barrier_is_told_of_a_killed_worker_at_once():
    """There no connection breaks, and no memory is read."""
    with Workers(_waits_at_a_barrier, 3, environment={"BURNISH_SHARED_MEMORY": "off"}) as workers:
        for rank in range(3):
            workers.message(rank)
        process = workers.processes[1]
        process.kill()
        outcomes = workers.outcomes(60)
    for rank in (0, 2):
        assert re.match(rf"Rank 1 of 3 \(.+, process {process.pid}\) is gone\. Rank {rank} stops", outcomes[rank].value)


def _joins_again(rank):
    sums = []
    for number in range(3):
        with join(timeout=600, first_contact=600) as group:
            sums.append(group.all_reduce(torch.tensor([rank + number])).item())
    return sums


@pytest.mark.slow
def test_workers_that_left_meet_again():
    assert run(_joins_again, 3) == [[3, 6, 9]] * 3


def _fails(rank, error):
    group = join(timeout=600, first_contact=600)
    group.barrier()
    if rank == 1:
        group.fail(error)
        group.close()
        return None
    try:
        group.all_reduce(torch.ones(3))
    except WorkerError as found:
        group.close()
        return found.comes_again
    return "went on"


@pytest.mark.slow
@pytest.mark.parametrize(("error", "again"), [(InputError("label 12 is out of range"), True), (EngineError("no memory"), False)])
def test_workers_are_told_whether_what_ends_another_would_come_again(error, again):
    assert run(_fails, 3, error) == [again, None, again]


def _loses_its_launcher(rank):
    group = join(timeout=600, first_contact=600)
    group.barrier()
    if rank == 1:
        os.getppid = lambda: 1
    try:
        while True:
            group.all_reduce(torch.ones(3))
    except WorkerError as error:
        group.close()
        return str(error)


@pytest.mark.slow
def test_workers_end_when_torchrun_is_killed():
    for said in run(_loses_its_launcher, 2, environment={"TORCHELASTIC_RUN_ID": "one"}):
        assert "launcher of rank 1 (torchrun) is gone" in said


def _loses_the_keeper(rank):
    group = join(timeout=600, first_contact=600)
    group.barrier()
    tell("joined")
    if rank == 0:
        time.sleep(3600)
    group.all_reduce(torch.ones(3))


@pytest.mark.slow
def test_the_rank_that_keeps_the_store_is_named_too():
    with Workers(_loses_the_keeper, 2) as workers:
        for rank in range(2):
            workers.message(rank)
        workers.processes[0].kill()
        outcome = workers.outcomes()[1]
    assert outcome.error is not None
    assert "WorkerError: Rank 0, which keeps the store at 127.0.0.1:" in outcome.error
    assert "is gone" in outcome.error


def _joins_alone(rank, first_contact):
    join(first_contact=first_contact)


@pytest.mark.slow
def test_ranks_that_do_not_come_are_named():
    with Workers(_joins_alone, 1, 1.0, environment={"WORLD_SIZE": "3"}) as workers:
        outcome = workers.outcomes()[0]
    assert "WorkerError: Ranks 1 and 2 of 3 have not come to 127.0.0.1:" in outcome.error
    assert "in 1 s: see whether all workers were started" in outcome.error


@pytest.mark.slow
def test_a_store_that_is_not_there_is_named(monkeypatch):
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        WorkerError, match=r"Rank 1 has not reached rank 0 at 127\.0\.0\.1:\d+ in 1 s: .*MASTER_ADDR and MASTER_PORT"
    ):
        join(first_contact=1)


@pytest.mark.slow
def test_a_port_that_something_else_listens_on(monkeypatch):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(other.getsockname()[1])}
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(
            WorkerError, match=r"Rank 0 cannot wait for the others at .*address already in use\. Choose another port"
        ):
            join(first_contact=1)
        monkeypatch.setenv("RANK", "1")
        with pytest.raises(
            WorkerError, match=r"Rank 1 waits for rank 0 at .*, where something answers that is no worker of this run"
        ):
            join(first_contact=1)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "2"}, r"RANK is not set: start them with torchrun, or unset WORLD_SIZE"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, r"RANK=2 is not below WORLD_SIZE=2: ranks count from 0"),
        ({"WORLD_SIZE": "two", "RANK": "0"}, r"WORLD_SIZE=two: it is to be a whole number of at least 1"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, r"MASTER_ADDR is not set"),
        ({"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "0"}, r"MASTER_PORT=0: it is to be a whole number"),
        (
            {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "2"},
            r"OMPI_COMM_WORLD_RANK=2 is not below OMPI_COMM_WORLD_SIZE=2",
        ),
        (
            {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"},
            r"SLURM_STEP_NUM_TASKS says that .* but SLURM_STEP_NODELIST is not set",
        ),
    ],
)
def test_an_environment_that_contradicts_itself_is_refused(monkeypatch, variables, message):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "BURNISH_MEETING"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=message):
        join()


def test_wrong_arguments_are_refused():
    with pytest.raises(ConfigurationError, match=r"timeout=0: give a number of seconds above 0"):
        join(timeout=0)
    with pytest.raises(ConfigurationError, match=r"operation='mean': give one of sum, min, max"):
        ProcessGroup(0, 1).all_reduce(torch.ones(1), "mean")
    with pytest.raises(ConfigurationError, match=r"size=0: give a whole number of workers, 1 or more"):
        ProcessGroup(0, 1).split(0)
    for device in ("tpu", "privateuseone", "cuda:x", "cuda:-1", "", 0):
        with pytest.raises(EngineError, match=rf"device={device!r}: workers exchange tensors on cpu or cuda"):
            join(device)
    with pytest.raises(EngineError, match=r"The all-reduce of values: this worker has left the group of workers \(close\)"):
        ProcessGroup(0, 2).all_reduce(torch.ones(1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(EngineError, match=r"device='cuda': this worker is number 0 of its machine, which has 0 GPUs"):
        join("cuda")


def test_without_torch_the_error_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    with pytest.raises(
        EngineError, match=rf"PyTorch is not installed: {re.escape(install_command('torch'))}, or train with one worker"
    ):
        store.torch_distributed()
