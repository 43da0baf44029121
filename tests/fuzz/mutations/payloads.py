"""What a tensor holds and declares, changed."""

from __future__ import annotations

from random import Random

from onnx import TensorProto, helper

from fuzz.mutations.places import changed_list
from fuzz.values import ELEMENT_TYPES, FLOATS, NAMES, integer


def changed_tensor(random: Random, tensor: TensorProto) -> str:
    chance = random.random()
    if chance < 0.2:
        return changed_list(random, tensor.dims, integer, "dims")
    if chance < 0.3:
        tensor.data_type = random.choice(ELEMENT_TYPES)
        return f"of element type {tensor.data_type}"
    if chance < 0.35:
        tensor.name = random.choice(NAMES)
        return f"called {tensor.name[:40]!r}"
    if chance < 0.45:
        return _changed_payload_length(random, tensor)
    if chance < 0.5:
        tensor.data_location = random.choice((TensorProto.EXTERNAL, TensorProto.DEFAULT))
        return f"its data location is {tensor.data_location}"
    if chance < 0.62:
        tensor.raw_data = b""
        tensor.dims[:] = random.choice(([], [0], [0, 3], [1], [1, 1], [4], [4, 4]))
        count = 1
        for extent in tensor.dims:
            count *= extent
        tensor.raw_data = bytes(count * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize) if _has_numpy(tensor) else b""
        return f"zeros of dims {list(tensor.dims)}"
    return _changed_elements(random, tensor)


def _has_numpy(tensor: TensorProto) -> bool:
    return tensor.data_type in TensorProto.DataType.values() and tensor.data_type not in (
        TensorProto.UNDEFINED,
        TensorProto.STRING,
    )


def _changed_payload_length(random: Random, tensor: TensorProto) -> str:
    length = len(tensor.raw_data)
    data = bytes(tensor.raw_data)
    tensor.raw_data = random.choice((data[: length // 2], data[:-1], data + b"\0", data + data, b""))
    return f"{len(tensor.raw_data)} bytes in place of {length}"


def _changed_elements(random: Random, tensor: TensorProto) -> str:
    """Elements that are shapes, axes and indices, in particular, become ones that fit nowhere."""
    is_integer = tensor.data_type == TensorProto.INT64
    element = (integer(random)).to_bytes(8, "little", signed=True) if is_integer else b""
    if is_integer and len(tensor.raw_data) >= 8:
        place = random.randrange(len(tensor.raw_data) // 8) * 8
        tensor.raw_data = tensor.raw_data[:place] + element + tensor.raw_data[place + 8 :]
        return f"an element is {int.from_bytes(element, 'little', signed=True)}"
    if is_integer and tensor.int64_data:
        index = random.randrange(len(tensor.int64_data))
        tensor.int64_data[index] = integer(random)
        return f"an element is {tensor.int64_data[index]}"
    if tensor.float_data:
        tensor.float_data[random.randrange(len(tensor.float_data))] = random.choice(FLOATS)
        return "a float is another"
    data = bytearray(tensor.raw_data)
    if not data:
        tensor.int32_data.append(integer(random) % (1 << 31))
        return "one more element of 32 bits"
    for _ in range(random.randint(1, len(data))):
        data[random.randrange(len(data))] = random.choice((0, 0x7F, 0x80, 0xFF, random.randrange(256)))
    tensor.raw_data = bytes(data)
    return "random bytes"
