"""What elementwise nodes are as instructions of the kernel in ``kernels/elementwise.cpp``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from burnish.graph import BURNISH_DOMAIN, attribute_value, constant_array

DTYPES = frozenset({ir.DataType.FLOAT, ir.DataType.BFLOAT16, ir.DataType.BOOL})
"""What the kernel reads and writes; it computes in float32."""

# The numbers are those of the enumeration in the kernel.
OPERATIONS = {
    "Add": 0,
    "Sub": 1,
    "Mul": 2,
    "Div": 3,
    "Max": 4,
    "Min": 5,
    "Neg": 6,
    "Sqrt": 7,
    "Reciprocal": 8,
    "Abs": 9,
    "Relu": 10,
    "Copy": 11,
    "Exp": 12,
    "Log": 13,
    "Tanh": 14,
    "Erf": 15,
    "Sigmoid": 16,
    "Less": 17,
    "LessOrEqual": 18,
    "Greater": 19,
    "GreaterOrEqual": 20,
    "Equal": 21,
    "And": 22,
    "Or": 23,
    "Not": 24,
    "Where": 25,
    "ReluGrad": 26,
    "NotZero": 27,
    "MulAdd": 28,
    "MulSub": 29,
    "SubMul": 30,
}
_JOINED = {
    (OPERATIONS["Add"], 0): OPERATIONS["MulAdd"],
    (OPERATIONS["Add"], 1): OPERATIONS["MulAdd"],
    (OPERATIONS["Sub"], 0): OPERATIONS["MulSub"],
    (OPERATIONS["Sub"], 1): OPERATIONS["SubMul"],
}
"""What a sum or difference becomes, one of whose operands, by its place, is a product."""

OPERANDS = 3
NONE = -1

Register = int
"""Of a program that is not assembled yet: tensors and results of instructions are counted up, constants down from -2."""


class Program:
    """Instructions in the order of their nodes; registers are assigned when the program is assembled."""

    def __init__(self) -> None:
        self.tensors: dict[ir.Value, Register] = {}
        self.constants: list[float] = []
        self._constant_registers: dict[str, Register] = {}
        self._values: dict[ir.Value, Register] = {}
        self._count = 0
        self._instructions: list[tuple[int, Register, tuple[Register, ...]]] = []
        self._computed: dict[tuple[int, tuple[Register, ...]], Register] = {}

    def add(self, node: ir.Node) -> None:
        """Append what a supported node computes."""
        operands = [self._operand(value) for value in node.inputs if value is not None]
        special = _SPECIAL.get(node.op_type)
        result = self.emit(node.op_type, *operands) if special is None else special(self, node, operands)
        self._values[node.outputs[0]] = result

    def emit(self, operation: str, *operands: Register) -> Register:
        """Append an instruction, where there is none like it; returns the register that it writes."""
        key = OPERATIONS[operation], operands
        if key not in self._computed:
            self._computed[key] = self._append(*key)
        return self._computed[key]

    def constant(self, value: float) -> Register:
        """The register of a constant, which has the digits of float32."""
        with np.errstate(over="ignore"):
            value = float(np.float32(value))
        key = repr(value)  # tells zeros of both signs apart, and finds NaN again
        if key not in self._constant_registers:
            self._constant_registers[key] = NONE - 1 - len(self.constants)
            self.constants.append(value)
        return self._constant_registers[key]

    def assemble(self, results: list[ir.Value]) -> list[int]:
        """The instructions as the kernel reads them; registers of what is not read any more are used again."""
        self._join({self._values[value] for value in results})
        inputs = len(self.tensors) + len(self.constants)
        written: set[Register] = set()
        for value in results:
            if self._values[value] in written:  # nodes that compute the same
                self._values[value] = self._append(OPERATIONS["Copy"], (self._values[value],))
            written.add(self._values[value])
        place = {register: index for index, register in enumerate(self.tensors.values())}
        place |= {NONE - 1 - index: len(self.tensors) + index for index in range(len(self.constants))}
        place |= {self._values[value]: inputs + index for index, value in enumerate(results)}
        fixed = set(place)
        last_read = {operand: index for index, (_, _, operands) in enumerate(self._instructions) for operand in operands}
        free: list[int] = []
        used = inputs + len(results)
        program: list[int] = []
        for index, (operation, register, operands) in enumerate(self._instructions):
            if register not in place:
                if not free:
                    free.append(used)
                    used += 1
                place[register] = free.pop()
            numbers = [place[operand] for operand in operands]
            program += [operation, place[register], *numbers, *[NONE] * (OPERANDS - len(numbers))]
            free += [place[operand] for operand in set(operands) - fixed if last_read[operand] == index]
        return program

    def _join(self, results: set[Register]) -> None:
        """Make one instruction of a product and the sum or difference that alone reads it: each is a pass over a block."""
        reads = Counter(operand for _, _, operands in self._instructions for operand in operands)
        products = {
            register: operands
            for operation, register, operands in self._instructions
            if operation == OPERATIONS["Mul"] and reads[register] == 1 and register not in results
        }
        joined = []
        taken = set()
        for operation, register, operands in self._instructions:
            place = next((index for index, operand in enumerate(operands) if operand in products), None)
            if place is not None and (operation, place) in _JOINED:
                taken.add(operands[place])
                operation, operands = _JOINED[operation, place], (*products[operands[place]], operands[1 - place])
            joined.append((operation, register, operands))
        self._instructions = [instruction for instruction in joined if instruction[1] not in taken]

    def _operand(self, value: ir.Value) -> Register:
        if value in self._values:
            return self._values[value]
        if value not in self.tensors:
            array = constant_array(value)
            if array is not None and array.size == 1:
                return self.constant(float(array.reshape(-1)[0]))
            self.tensors[value] = self._next()
        return self.tensors[value]

    def _append(self, operation: int, operands: tuple[Register, ...]) -> Register:
        register = self._next()
        self._instructions.append((operation, register, operands))
        return register

    def _next(self) -> Register:
        self._count += 1
        return self._count - 1


def is_supported(node: ir.Node) -> bool:
    """Whether a node is elementwise arithmetic that the kernel computes, by operator and element types; no shape is read."""
    if node.domain not in ("", BURNISH_DOMAIN) or (node.domain == BURNISH_DOMAIN) != (node.op_type == "ReluGrad"):
        return False
    if node.op_type not in OPERATIONS.keys() | _SPECIAL.keys() or node.op_type in ("Copy", "NotZero"):
        return False
    given = [value for value in node.inputs if value is not None]
    if len(given) != len(node.inputs) and node.op_type != "Clip":
        return False
    if len(node.outputs) != 1 or not given:
        return False
    arithmetic = given[:1] if node.op_type == "Pow" else given  # an exponent may be of any type
    if any(value.dtype not in DTYPES for value in (*node.outputs, *arithmetic)):
        return False
    if node.op_type in ("Max", "Min") and len(given) != 2:
        return False
    if node.op_type == "Pow":
        exponent = constant_array(given[1])
        return exponent is not None and exponent.size == 1 and float(exponent.reshape(-1)[0]) in _POWERS
    if node.op_type == "Gelu":
        return bool(attribute_value(node, "approximate", "none") == "none")
    return True


def _cast(program: Program, node: ir.Node, operands: list[Register]) -> Register:
    return program.emit("NotZero" if node.outputs[0].dtype == ir.DataType.BOOL else "Copy", operands[0])


def _clip(program: Program, node: ir.Node, operands: list[Register]) -> Register:
    bounds = [value is not None for value in (*node.inputs[1:3], None, None)[:2]]
    result, rest = operands[0], operands[1:]
    if bounds[0]:
        result = program.emit("Max", result, rest.pop(0))
    if bounds[1]:
        result = program.emit("Min", result, rest.pop(0))
    return result if bounds[0] or bounds[1] else program.emit("Copy", result)


def _gelu(program: Program, node: ir.Node, operands: list[Register]) -> Register:
    """x / 2 (1 + erf(x / sqrt(2)))."""
    x = operands[0]
    wide = program.emit("Add", program.emit("Erf", program.emit("Mul", x, program.constant(0.5**0.5))), program.constant(1.0))
    return program.emit("Mul", program.emit("Mul", x, program.constant(0.5)), wide)


_POWERS: dict[float, Callable[[Program, Register], Register]] = {
    -1.0: lambda program, x: program.emit("Reciprocal", x),
    0.5: lambda program, x: program.emit("Sqrt", x),
    1.0: lambda program, x: program.emit("Copy", x),
    2.0: lambda program, x: program.emit("Mul", x, x),
    3.0: lambda program, x: program.emit("Mul", program.emit("Mul", x, x), x),
}


def _pow(program: Program, node: ir.Node, operands: list[Register]) -> Register:
    exponent = node.inputs[1]
    assert exponent is not None
    array = constant_array(exponent)
    assert array is not None
    return _POWERS[float(array.reshape(-1)[0])](program, operands[0])


_SPECIAL: dict[str, Callable[[Program, ir.Node, list[Register]], Register]] = {
    "Cast": _cast,
    "Clip": _clip,
    "Gelu": _gelu,
    "Pow": _pow,
}
