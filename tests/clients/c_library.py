"""The C client, built against the ONNX Runtime library of the Python package and called through ctypes."""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime

from burnish.files.digest import BLANK, stamped

CC, CXX = os.environ.get("CC", "gcc"), os.environ.get("CXX", "g++")
SOURCES = Path(__file__).parents[2] / "clients" / "c"
STATUSES = (
    "ok",
    "InputError",
    "ConfigurationError",
    "CheckpointError",
    "EngineError",
    "NonFiniteLossError",
    "UnsupportedOperatorError",
)
WARNINGS = ("-std=c11", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror")
SANITIZED = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
"""One set of flags for all that runs under sanitizers: compiling the client with them takes as long as most tests."""
MAX_RANK = 8
AVERAGE, AS_TRAINED = 1, 2


def missing() -> str | None:
    """Why the C client cannot be built here; None where it can."""
    if shutil.which(CC) is None:
        return f"there is no {CC}: install a compiler (on Debian the package gcc), or set CC to another"
    if not libraries():
        return "the Python package of this onnxruntime has no libonnxruntime.so: install the Linux wheel"
    return None


def libraries() -> list[Path]:
    return sorted((Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so*"))


def link_folder(folder: Path) -> Path:
    """A folder with ONNX Runtime's library under the names that a linker and a loader look for."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("libonnxruntime.so", "libonnxruntime.so.1"):
        if not (folder / name).exists():
            (folder / name).symlink_to(libraries()[0])
    return folder


@cache
def client_object(flags: tuple[str, ...] = ()) -> Path:
    """burnish.c compiled once for all that is linked with it."""
    output = Path(tempfile.mkdtemp(prefix="burnish-c-"), "burnish.o")
    atexit.register(shutil.rmtree, output.parent, ignore_errors=True)
    _run([CC, *WARNINGS, "-fPIC", *flags, "-c", str(SOURCES / "burnish.c"), "-o", str(output)])
    return output


def build(folder: Path, name: str, *sources: Path, flags: tuple[str, ...] = ()) -> Path:
    """Link the client, and sources beside it; returns the program, or the library where there are none."""
    lib = link_folder(folder / "lib")
    output = folder / name
    is_cpp = any(source.suffix == ".cpp" for source in sources)
    command = [CXX, "-std=c++17"] if is_cpp else [CC, "-std=c11"]
    command += [*WARNINGS[1:], *flags, f"-I{SOURCES}", *map(str, sources), str(client_object(flags))]
    command += [] if sources else ["-shared"]
    _run([*command, "-o", str(output), f"-L{lib}", f"-Wl,-rpath,{lib}", "-lonnxruntime", "-lm"])
    return output


def _run(command: list[str]) -> None:
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr


def restamped(content: bytes) -> bytes:
    """A file that was changed, with the digest that belongs to it: what is behind the check of the digest is to be reached."""
    entry = re.compile(rb'("burnish\.digest"\s*:\s*")sha256:[0-9a-f]{64}')
    blank = entry.sub(rb"\g<1>" + BLANK.encode(), content, count=1)
    return stamped(blank) if entry.search(content) else content


class Tensor(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("dtype", ctypes.c_int),
        ("rank", ctypes.c_size_t),
        ("shape", ctypes.c_int64 * MAX_RANK),
        ("data", ctypes.c_void_p),
    )

    @classmethod
    def of(cls, name: str, array: np.ndarray) -> Tensor:
        shape = (ctypes.c_int64 * MAX_RANK)(*array.shape)
        return cls(name.encode(), int(ir.DataType.from_numpy(array.dtype)), array.ndim, shape, array.ctypes.data)

    def array(self) -> np.ndarray:
        shape = tuple(self.shape[: self.rank])
        dtype = ir.DataType(self.dtype).numpy()
        return np.frombuffer(ctypes.string_at(self.data, dtype.itemsize * int(np.prod(shape))), dtype).reshape(shape).copy()


class Outputs(ctypes.Structure):
    _fields_ = (("tensors", ctypes.POINTER(Tensor)), ("count", ctypes.c_size_t))

    def arrays(self) -> dict[str, np.ndarray]:
        return {self.tensors[i].name.decode(): self.tensors[i].array() for i in range(self.count)}


class Options(ctypes.Structure):
    _fields_ = (("seed", ctypes.c_int64), ("threads", ctypes.c_int), ("optimization", ctypes.c_int), ("models", ctypes.c_char_p))


class ClientError(Exception):
    """A status other than ``BURNISH_OK``: ``kind`` is the name of burnish's exception."""

    def __init__(self, status: int, message: str):
        self.kind = STATUSES[status]
        super().__init__(f"{self.kind}: {message}")


class Client:
    """The library: opens sessions."""

    def __init__(self, path: Path):
        self.library = ctypes.CDLL(str(path))
        self.library.burnish_message.restype = ctypes.c_char_p
        self.library.burnish_extra.restype = ctypes.c_char_p
        self.library.burnish_step_count.restype = ctypes.c_int64
        self.library.burnish_cache_computed.restype = ctypes.c_int64
        self.library.burnish_sample_axis.restype = ctypes.c_int64
        self.library.burnish_cache_has.restype = ctypes.c_bool

    def check(self, status: int) -> None:
        if status:
            raise ClientError(status, self.library.burnish_message().decode())

    def open(self, folder: Path, seed: int = 0, threads: int = 1, optimization: int = 0, models: Path | None = None) -> Session:
        handle = ctypes.c_void_p()
        options = Options(seed, threads, optimization, None if models is None else os.fsencode(models))
        self.check(self.library.burnish_open(os.fsencode(folder), ctypes.byref(options), ctypes.byref(handle)))
        return Session(self, handle)


def tensors_of(batch: Mapping[str, np.ndarray]) -> tuple[list[np.ndarray], ctypes.Array[Tensor]]:
    """Arrays in C order, which are to be held while they are read, and what the client reads."""
    arrays = {name: np.asarray(array, order="C") for name, array in batch.items()}
    return [*arrays.values()], (Tensor * len(arrays))(*(Tensor.of(name, array) for name, array in arrays.items()))


class FeatureCache:
    def __init__(self, client: Client, handle: ctypes.c_void_p):
        self._client, self._library, self._handle = client, client.library, handle

    def features(self, samples: Sequence[int], batch: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        arrays, tensors = tensors_of(batch or {})
        numbers, outputs = (ctypes.c_int64 * len(samples))(*samples), Outputs()
        lengths = ctypes.c_size_t(len(samples)), ctypes.c_size_t(len(arrays))
        status = self._library.burnish_cache_features(
            self._handle, numbers, lengths[0], tensors, lengths[1], ctypes.byref(outputs)
        )
        self._client.check(status)
        return outputs.arrays()

    def has(self, samples: Sequence[int]) -> bool:
        return bool(self._library.burnish_cache_has(self._handle, (ctypes.c_int64 * len(samples))(*samples), len(samples)))

    @property
    def computed(self) -> int:
        return int(self._library.burnish_cache_computed(self._handle))

    def close(self) -> None:
        self._library.burnish_cache_close(self._handle)


class Session:
    def __init__(self, client: Client, handle: ctypes.c_void_p):
        self._client, self._library, self._handle = client, client.library, handle

    def step(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return self._run("burnish_step", batch)

    def evaluate(self, batch: Mapping[str, np.ndarray], flags: int = 0) -> dict[str, np.ndarray]:
        return self._run("burnish_evaluate", batch, flags)

    def predict(self, batch: Mapping[str, np.ndarray], flags: int = 0) -> dict[str, np.ndarray]:
        return self._run("burnish_predict", batch, flags)

    def features(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return self._run("burnish_features", batch)

    def cache(self, limit: int = 0) -> FeatureCache:
        handle = ctypes.c_void_p()
        self._client.check(self._library.burnish_cache_open(self._handle, ctypes.c_size_t(limit), ctypes.byref(handle)))
        return FeatureCache(self._client, handle)

    def _run(self, function: str, batch: Mapping[str, np.ndarray], *flags: int) -> dict[str, np.ndarray]:
        arrays, tensors = tensors_of(batch)
        outputs = Outputs()
        arguments = (self._handle, tensors, ctypes.c_size_t(len(arrays)), *flags, ctypes.byref(outputs))
        self._client.check(getattr(self._library, function)(*arguments))
        return outputs.arrays()

    def set(self, name: str, value: float) -> None:
        self._client.check(self._library.burnish_set(self._handle, name.encode(), ctypes.c_double(value)))

    @property
    def step_count(self) -> int:
        return int(self._library.burnish_step_count(self._handle))

    def sample_axis(self, name: str) -> int:
        return int(self._library.burnish_sample_axis(self._handle, name.encode()))

    def state(self) -> dict[str, np.ndarray]:
        arrays: dict[str, np.ndarray] = {}
        tensor = Tensor()
        while not self._library.burnish_state_at(self._handle, ctypes.c_size_t(len(arrays)), ctypes.byref(tensor)):
            arrays[tensor.name.decode()] = tensor.array()
        return arrays

    def state_entry(self, name: str) -> np.ndarray:
        tensor = Tensor()
        self._client.check(self._library.burnish_state(self._handle, name.encode(), ctypes.byref(tensor)))
        return tensor.array()

    def write_state(self, name: str, array: np.ndarray) -> None:
        dense = np.asarray(array, order="C")
        self._client.check(self._library.burnish_write_state(self._handle, ctypes.byref(Tensor.of(name, dense))))

    def save(self, path: Path, extra: str | None = None) -> None:
        encoded = None if extra is None else extra.encode()
        self._client.check(self._library.burnish_save(self._handle, os.fsencode(path), encoded))

    def restore(self, path: Path) -> str:
        self._client.check(self._library.burnish_restore(self._handle, os.fsencode(path)))
        return self._library.burnish_extra(self._handle).decode()

    def export(self, path: Path, flags: int = 0) -> None:
        self._client.check(self._library.burnish_export(self._handle, os.fsencode(path), flags))

    def close(self) -> None:
        self._library.burnish_close(self._handle)
