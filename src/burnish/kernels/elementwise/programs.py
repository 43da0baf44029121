"""Convert elementwise nodes into instructions of the kernel in ``elementwise.cpp``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from burnish.graph import BURNISH_DOMAIN, attribute_value, constant_array
from burnish.operators.activation import RELU_GRAD

DTYPES = frozenset({ir.DataType.FLOAT, ir.DataType.BFLOAT16, ir.DataType.BOOL})
"""The dtypes that the kernel reads and writes; it computes in float32."""

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
    RELU_GRAD.name: 26,
    "NotZero": 27,
    "MulAdd": 28,
    "MulSub": 29,
    "SubMul": 30,
    "Normal": 31,
    "RowMean": 32,
}
_JOINED = {
    (OPERATIONS["Add"], 0): OPERATIONS["MulAdd"],
    (OPERATIONS["Add"], 1): OPERATIONS["MulAdd"],
    (OPERATIONS["Sub"], 0): OPERATIONS["MulSub"],
    (OPERATIONS["Sub"], 1): OPERATIONS["SubMul"],
}
"""The fused operation for a sum or difference with a product as one of its operands, by position."""

OPERANDS = 3
NONE = -1

Register = int
"""A register of a program before assembly: tensors and results of instructions count up, constants down from -2."""

CLOSE = 1e-6
"""The largest relative difference of a constant in a formula: float32 rounds by less."""


@dataclass(frozen=True)
class _Instruction:
    operation: int
    results: tuple[Register, ...]
    operands: tuple[Register, ...]


class Program:
    """Instructions in the order of their nodes; registers are assigned when the program is assembled."""

    def __init__(self) -> None:
        self.tensors: dict[ir.Value, Register] = {}
        self.constants: list[float] = []
        self._constant_registers: dict[str, Register] = {}
        self._constant_of: dict[Register, float] = {}
        self._values: dict[ir.Value, Register] = {}
        self._count = 0
        self._instructions: list[_Instruction] = []
        self._computed: dict[tuple[int, tuple[Register, ...]], _Instruction] = {}
        self._made: dict[Register, _Instruction] = {}

    def add(self, node: ir.Node) -> None:
        operands = [self._operand(value) for value in node.inputs if value is not None]
        special = _SPECIAL.get(node.op_type)
        result = self.emit(node.op_type, *operands) if special is None else special(self, node, operands)
        self._values[node.outputs[0]] = result

    def rename(self, value: ir.Value, new: ir.Value) -> None:
        """Assign the register of one value to another."""
        self._values[new] = self._operand(value)

    def average_rows(self, value: ir.Value, means: ir.Value) -> None:
        """Append the mean of each row of a value; only the kernel of updates by rows computes it."""
        self._values[means] = self.emit("RowMean", self._operand(value))

    def emit(self, operation: str, *operands: Register) -> Register:
        """Append an instruction unless an equal one exists; return its result register."""
        if operation == "Copy":  # registers are always float32
            return operands[0]
        result = None
        if operation == "Add":
            result = self._distribution(operands)
        elif operation == "Mul":
            halved = (register for register in self._multiplied(operands, 1.0) if self._operands_of("Normal", register))
            result = next(halved, None)
            result = self._density(operands) if result is None else result
        return self._compute(OPERATIONS[operation], operands).results[0] if result is None else result

    def normal(self, x: Register) -> tuple[Register, Register]:
        """Return the registers of the standard normal distribution function of ``x``, and of its density."""
        distribution, density = self._compute(OPERATIONS["Normal"], (x,)).results
        return distribution, density

    def constant(self, value: float) -> Register:
        """Return the register of a constant, which is rounded to float32."""
        with np.errstate(over="ignore"):
            value = float(np.float32(value))
        key = repr(value)  # distinguishes zeros by sign, and finds NaN again
        if key not in self._constant_registers:
            self._constant_registers[key] = NONE - 1 - len(self._constant_of)
            self._constant_of[self._constant_registers[key]] = value
        return self._constant_registers[key]

    def assemble(self, results: list[ir.Value], summed: Sequence[ir.Value] = ()) -> tuple[list[int], list[int]]:
        """Return the instructions in the kernel's form; registers are reused after their last read.

        Afterwards, ``constants`` holds only constants that they read.

        Args:
            results: values written to memory.
            summed: values that registers must hold at the end.

        Returns:
            The instructions, and the registers of ``summed``.
        """
        totals = [self._values[value] for value in summed]
        self._drop_unread({*(self._values[value] for value in results), *totals})
        self._join({*(self._values[value] for value in results), *totals})
        # Tensors, constants and results of another node too are copied.
        written = {register for register in self._values.values() if register < 0} | set(self.tensors.values())
        for value in results:
            if self._values[value] in written:
                self._values[value] = self._append(OPERATIONS["Copy"], (self._values[value],)).results[0]
            written.add(self._values[value])
        read = {*totals, *(operand for instruction in self._instructions for operand in instruction.operands)}
        constants = [register for register in self._constant_of if register in read]
        self.constants = [self._constant_of[register] for register in constants]
        inputs = len(self.tensors) + len(constants)
        place = {register: index for index, register in enumerate([*self.tensors.values(), *constants])}
        place |= {self._values[value]: inputs + index for index, value in enumerate(results)}
        used = inputs + len(results)
        for register in totals:
            if register not in place:
                place[register] = used
                used += 1
        fixed = set(place)
        last_read = {operand: index for index, instruction in enumerate(self._instructions) for operand in instruction.operands}
        free: list[int] = []
        program: list[int] = []
        for index, instruction in enumerate(self._instructions):
            for register in instruction.results:
                if register not in place:
                    if not free:
                        free.append(used)
                        used += 1
                    place[register] = free.pop()
            first, *others = (place[register] for register in instruction.results)
            numbers = [*(place[operand] for operand in instruction.operands), *others]
            program += [instruction.operation, first, *numbers, *[NONE] * (OPERANDS - len(numbers))]
            unread = {register for register in instruction.results if register not in last_read}
            done = {operand for operand in instruction.operands if last_read[operand] == index}
            free += [place[register] for register in (unread | done) - fixed]
        return program, [place[register] for register in totals]

    def _drop_unread(self, results: set[Register]) -> None:
        """Remove the instructions that no result needs, such as parts of a fused formula."""
        needed = set(results)
        kept = []
        for instruction in reversed(self._instructions):
            if needed.intersection(instruction.results):
                needed.update(instruction.operands)
                kept.append(instruction)
        self._instructions = kept[::-1]

    def _join(self, results: set[Register]) -> None:
        """Fuse a product with the sum or difference that is its only reader: each instruction is a pass over a block."""
        reads = Counter(operand for instruction in self._instructions for operand in instruction.operands)
        products = {
            instruction.results[0]: instruction.operands
            for instruction in self._instructions
            if instruction.operation == OPERATIONS["Mul"] and reads[instruction.results[0]] == 1
        }
        for register in results:
            products.pop(register, None)
        joined = []
        taken = set()
        for instruction in self._instructions:
            operation, operands = instruction.operation, instruction.operands
            place = next((index for index, operand in enumerate(operands) if operand in products), None)
            if place is not None and (operation, place) in _JOINED:
                taken.add(operands[place])
                operands = (*products[operands[place]], operands[1 - place])
                instruction = _Instruction(_JOINED[operation, place], instruction.results, operands)
            joined.append(instruction)
        self._instructions = [instruction for instruction in joined if instruction.results[0] not in taken]

    def _distribution(self, terms: tuple[Register, ...]) -> Register | None:
        """Return the sum 1 + erf(x / sqrt(2)) as twice the standard normal distribution function of x; None for any other."""
        for one, function in (terms, terms[::-1]):
            if self._constant_of.get(one) == 1.0:
                for argument in self._operands_of("Erf", function):
                    for x in self._multiplied((argument,), math.sqrt(0.5)):
                        return self.emit("Mul", self.normal(x)[0], self.constant(2.0))
        return None

    def _density(self, factors: tuple[Register, ...]) -> Register | None:
        """Return the product exp(-x^2 / 2) / sqrt(2 pi) as the standard normal density at x; None for any other."""
        for exponential in self._multiplied(factors, 1 / math.sqrt(2 * math.pi)):
            for power in self._operands_of("Exp", exponential):
                for square in self._multiplied((power,), -0.5):
                    product = self._operands_of("Mul", square)
                    if product and product[0] == product[1]:
                        return self.normal(product[0])[1]
        return None

    def _operands_of(self, operation: str, register: Register) -> tuple[Register, ...]:
        made = self._made.get(register)
        return made.operands if made is not None and made.operation == OPERATIONS[operation] else ()

    def _multiplied(self, factors: tuple[Register, ...], constant: float) -> Iterator[Register]:
        """Yield the registers whose product with a constant equals the product of factors."""
        scale = 1.0
        while True:
            others = [register for register in factors if register not in self._constant_of]
            scale *= math.prod(self._constant_of[register] for register in factors if register in self._constant_of)
            if len(others) != 1:
                return
            if math.isclose(scale, constant, rel_tol=CLOSE):
                yield others[0]
            negated, quotient = self._operands_of("Neg", others[0]), self._operands_of("Div", others[0])
            divisor = self._constant_of.get(quotient[1], 0.0) if quotient else 0.0
            if negated:
                scale, factors = -scale, negated
            elif divisor:
                scale, factors = scale / divisor, quotient[:1]
            else:
                factors = self._operands_of("Mul", others[0])

    def _operand(self, value: ir.Value) -> Register:
        if value in self._values:
            return self._values[value]
        if value not in self.tensors:
            array = constant_array(value)
            if array is not None and array.size == 1:
                return self.constant(float(array.reshape(-1)[0]))
            self.tensors[value] = self._next()
        return self.tensors[value]

    def _compute(self, operation: int, operands: tuple[Register, ...]) -> _Instruction:
        key = operation, operands
        if key not in self._computed:
            self._computed[key] = self._append(*key)
        return self._computed[key]

    def _append(self, operation: int, operands: tuple[Register, ...]) -> _Instruction:
        results = tuple(self._next() for _ in range(2 if operation == OPERATIONS["Normal"] else 1))
        instruction = _Instruction(operation, results, operands)
        self._instructions.append(instruction)
        self._made |= dict.fromkeys(results, instruction)
        return instruction

    def _next(self) -> Register:
        self._count += 1
        return self._count - 1


def is_supported(node: ir.Node) -> bool:
    """True if the kernel computes an elementwise node, by operator and element types; shapes are not read."""
    if node.domain not in ("", BURNISH_DOMAIN) or (node.domain == BURNISH_DOMAIN) != RELU_GRAD.is_of(node):
        return False
    if node.op_type not in OPERATIONS.keys() | _SPECIAL.keys() or node.op_type in ("Copy", "NotZero", "Normal", "RowMean"):
        return False
    given = [value for value in node.inputs if value is not None]
    if len(given) != len(node.inputs) and node.op_type != "Clip":
        return False
    if len(node.outputs) != 1 or not given:
        return False
    arithmetic = given[:1] if node.op_type == "Pow" else given  # an exponent may have any type
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
    x = operands[0]
    return program.emit("Mul", x, program.normal(x)[0])


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
