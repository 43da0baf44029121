"""Which command's tests notice mistakes: small changes of the code at random places, and the tests that run the changed lines.

    PYTHONPATH=src:tests:benchmarks python tests/mutants.py --record calls.json
    PYTHONPATH=src:tests:benchmarks python tests/mutants.py --calls calls.json --mutants 100

The first writes which functions of burnish each test calls. The second makes mutants, the same ones each time, and runs for each
the tests that call the changed function: those of ``make test``, those of ``make test-all``, those of the campaign, until one
fails. Each mutant runs in a child process that changes one function before its first test. The code in ``src`` stays as is.
"""

from __future__ import annotations

import argparse
import ast
import copy
import gc
import inspect
import json
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType

import pytest

import burnish

SOURCE = Path(burnish.__file__).parent
AREAS = ("autodiff.py", "operators", "rewriting", "norms", "optim")
TESTS = ("test_autodiff.py", "operators", "rewriting", "norms", "optim")
SIGNS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
COMPARISONS = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
COMMANDS = ("make test", "make test-all", "make test-campaign")


@dataclass(frozen=True)
class Mutant:
    """One change in a function.

    Attributes:
        function: ``file:line of its first decorator:name``, as ``called_functions`` writes it.
        line: of the change.
        kind: of the change.
        code: of the changed function.
    """

    function: str
    line: int
    kind: str
    code: CodeType


def changes_at(node: ast.AST) -> list[str]:
    """Return the kinds of changes that a node admits."""
    if isinstance(node, ast.BinOp) and type(node.op) in SIGNS:
        return ["flip a sign", "swap operands"] if isinstance(node.op, ast.Sub | ast.Div) else ["flip a sign"]
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        return ["flip a comparison"]
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return ["off by one"]
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return ["drop a statement"]
    return ["drop a statement"] if isinstance(node, ast.AugAssign) else []


class Changed(ast.NodeTransformer):
    """Makes one change: at the node of that place in the order of ``ast.walk``."""

    def __init__(self, target: ast.AST, kind: str) -> None:
        self.target, self.kind = target, kind

    def visit(self, node: ast.AST) -> ast.AST:
        if node is not self.target:
            return self.generic_visit(node)
        if isinstance(node, ast.BinOp):
            if self.kind == "swap operands":
                node.left, node.right = node.right, node.left
            else:
                node.op = SIGNS[type(node.op)]()
        elif isinstance(node, ast.Compare):
            node.ops[0] = COMPARISONS[type(node.ops[0])]()
        elif isinstance(node, ast.Constant):
            node.value += 1
        else:
            return ast.copy_location(ast.Pass(), node)
        return node


def every_mutant() -> Iterator[tuple[Path, ast.Module, int, str]]:
    """Yield files, their trees, and the places and kinds of changes inside their functions."""
    for area in AREAS:
        for path in sorted((SOURCE / area).rglob("*.py")) if (SOURCE / area).is_dir() else [SOURCE / area]:
            tree = ast.parse(path.read_text())
            inside = {
                id(inner)
                for function in ast.walk(tree)
                if isinstance(function, ast.FunctionDef)
                for statement in function.body
                for inner in ast.walk(statement)
            }
            for place, node in enumerate(ast.walk(tree)):
                if id(node) in inside:
                    for kind in changes_at(node):
                        yield path, tree, place, kind


def functions_of(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from functions_of(constant)


def key_of(code: CodeType) -> str:
    return f"{Path(code.co_filename).relative_to(SOURCE)}:{code.co_firstlineno}:{code.co_name}"


def place_of(code: CodeType) -> tuple[str, int, str]:
    return code.co_filename, code.co_firstlineno, code.co_name


def drawn_mutants(count: int, seed: int, called: set[str]) -> list[Mutant]:
    """Draw mutants of functions that tests call, as many from each area as it has places for them."""
    candidates = list(every_mutant())
    random.Random(seed).shuffle(candidates)
    found: list[Mutant] = []
    for path, tree, place, kind in candidates:
        if len(found) == count:
            break
        changed = copy.deepcopy(tree)
        node = list(ast.walk(changed))[place]
        changed = ast.fix_missing_locations(Changed(node, kind).visit(changed))
        before = {place_of(code): code for code in functions_of(compile(tree, str(path), "exec"))}
        # The outermost comes first, and holds those inside it; neither the bodies of classes nor comprehensions are meant.
        different = [
            code
            for code in functions_of(compile(changed, str(path), "exec"))
            if code.co_flags & inspect.CO_NEWLOCALS and code.co_name[0] != "<" and before.get(place_of(code)) != code
        ]
        fits = different and before[place_of(different[0])].co_freevars == different[0].co_freevars
        if fits and key_of(different[0]) in called:
            found.append(Mutant(key_of(different[0]), node.lineno, kind, different[0]))
    return found


class Recorder:
    """Writes for each test which functions in the areas it calls, and its seconds of processor time."""

    def __init__(self, path: Path) -> None:
        self.path, self.calls, self.seen = path, {}, set()
        self.prefixes = tuple(str(SOURCE / area) for area in AREAS)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep what ``make test`` runs, and one case of each test that it runs none of."""
        kept, functions = [], set()
        for command in (0, 1):
            for item in items:
                function = item.nodeid.partition("[")[0]
                if command_of(item) == command and (command == 0 or function not in functions):
                    kept.append(item)
                    functions.add(function)
        items[:] = kept

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.seen, start = set(), time.process_time()
        sys.setprofile(self._see)
        result = yield
        sys.setprofile(None)
        names = sorted({key_of(code) for code in self.seen if code.co_filename.startswith(self.prefixes)})
        self.calls[item.nodeid] = [round(time.process_time() - start, 3), names]
        return result

    def _see(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            self.seen.add(frame.f_code)

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps(self.calls))


def command_of(item: pytest.Item) -> int:
    """Return the place in ``COMMANDS`` of the first one that runs a test."""
    return 2 if item.get_closest_marker("campaign") else int(item.get_closest_marker("slow") is not None)


class Trial:
    """Runs mutants in place of the tests."""

    def __init__(self, calls: Path, count: int, seed: int, limit: float, outcome: Path) -> None:
        self.calls = json.loads(calls.read_text())
        self.count, self.seed, self.limit, self.outcome = count, seed, limit, outcome

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        functions, seconds = defaultdict(set), {}
        for node, (taken, names) in self.calls.items():
            test = node.partition("[")[0]
            seconds[test] = min(taken, seconds.get(test, taken))
            for name in names:
                functions[name] |= {test, test.partition("::")[0]}
        rows = []
        for number, mutant in enumerate(drawn_mutants(self.count, self.seed, set(functions))):
            items = [[], [], []]
            for item in session.items:
                test, exact = item.nodeid.partition("[")[0], self.calls.get(item.nodeid)
                # A test that was not recorded may call what others of its file do.
                known = test if test in seconds else test.partition("::")[0]
                if mutant.function in exact[1] if exact else known in functions[mutant.function]:
                    items[command_of(item)].append((exact[0] if exact else seconds.get(test, 1.0), item))
            rows.append(self._row(mutant, items))
            print(
                f"\n{number:3} {rows[-1]['killed by'] or 'survives':18} {mutant.function} line {mutant.line}: {mutant.kind}",
                flush=True,
            )
            self.outcome.write_text(json.dumps(rows, indent=1))
        print(Counter(row["killed by"] for row in rows))
        return True

    def _row(self, mutant: Mutant, items: list[list[tuple[float, pytest.Item]]]) -> dict[str, object]:
        row = {
            "function": mutant.function,
            "line": mutant.line,
            "kind": mutant.kind,
            "killed by": None,
            "test": None,
            "ended": [],
        }
        for command, chosen in zip(COMMANDS, items, strict=True):
            test, is_whole = in_child(mutant, [item for _, item in sorted(chosen, key=lambda pair: pair[0])], self.limit)
            row["ended"].append(is_whole)
            if test:
                return row | {"killed by": "not applied" if test == "not applied" else command, "test": test}
        return row


def in_child(mutant: Mutant, items: list[pytest.Item], limit: float) -> tuple[str, bool]:
    """Run tests on a mutant until one fails; return that one, or nothing, and whether all ran within the seconds."""
    if not items:
        return "", True
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit) + 5, int(limit) + 5))
        os.setpgid(0, 0)
        try:
            os.write(writing, (failing_test(mutant, items, limit) or "whole").encode())
        except BaseException:
            os.write(writing, f"error: {traceback.format_exc()}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    # A mutant may hang; processes that its tests started end with it.
    deadline = time.monotonic() + 4 * limit
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            break
        time.sleep(0.02)
    with os.fdopen(reading) as stream:
        said = stream.read()
    assert not said.startswith("error"), said
    if said in ("whole", "limit"):
        return "", said == "whole"
    return said or "a crash, or no end", True


def failing_test(mutant: Mutant, items: list[pytest.Item], limit: float) -> str:
    """Change the function, and run tests in turn; return the one that fails, ``limit`` where the time is up, or nothing."""
    failed: list[str] = []

    class Watch:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                failed.append(report.nodeid)

    changed = 0
    gc.unfreeze()  # what the collection of tests left, the functions among it, is not listed otherwise
    for each in gc.get_objects():
        if isinstance(each, FunctionType) and place_of(each.__code__) == place_of(mutant.code):
            each.__code__ = mutant.code
            changed += 1
    if not changed:
        return "not applied"  # nothing holds the function: what called it when it was recorded is gone
    items[0].config.pluginmanager.register(Watch())
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    start = time.process_time()
    for place, item in enumerate(items):
        if time.process_time() - start > limit:
            return "limit"
        following = items[place + 1] if place + 1 < len(items) else None
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if failed:
            return failed[0]
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, help="write which functions each test calls")
    parser.add_argument("--calls", type=Path, help="what --record wrote")
    parser.add_argument("--mutants", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=60, help="seconds of processor time for each command's tests of a mutant")
    parser.add_argument("--outcome", type=Path, default=Path("mutants.json"))
    options = parser.parse_args()
    if options.record:
        plugin = Recorder(options.record)
    elif options.calls:
        plugin = Trial(options.calls, options.mutants, options.seed, options.limit, options.outcome)
    else:
        parser.error("give --record FILE first, then --calls FILE")
    folder = Path(__file__).parent
    return pytest.main(["-q", "-s", "-p", "no:cacheprovider", *(str(folder / name) for name in TESTS)], plugins=[plugin])


if __name__ == "__main__":
    sys.exit(main())
