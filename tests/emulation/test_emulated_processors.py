"""Kernels compile for other processors, are the ones that those choose in a wheel, and pass the tests of kernels there."""

from __future__ import annotations

import re
import signal

import numpy as np
import pytest

from burnish.kernels import compiling
from emulation.processors import AVX2, NEON, OPERATORS, PROCESSORS, PROJECT, SSE, Processor, build
from emulation.setting_up import is_ready

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(not is_ready(), reason="nothing is set up to emulate processors with: make test-arm does it"),
]
TESTS = PROJECT / "tests" / "engines"
EXPECTED = {NEON: "armv8-a", SSE: "x86-64-v2", AVX2: "x86-64-v3"}
each_processor = pytest.mark.parametrize("processor", PROCESSORS, ids=[processor.level.name for processor in PROCESSORS])
SUITE = sorted(path for path in (TESTS / "onnxruntime").glob("test_*.py") if "kernels=True" in path.read_text(encoding="utf-8"))
# The node of autograd's takes the headers of Python for Arm besides.
TORCH_KERNELS = sorted(set(compiling.TORCH.rglob("*.cpp")) - set(compiling.TORCH.rglob("autograd_node.cpp")))
TORCH_SUITE = [
    TESTS / "torch" / f"test_{name}.py"
    for name in (
        *("batch_norm_kernels", "normalization_kernels", "group_norm_kernel", "local_response_kernel", "interpolate_kernel"),
        *("elementwise_kernels", "depthwise", "winograd", "pointwise_gradients", "narrow_convolution_gradients"),
        *("product_kernel", "row_kernels", "attention_kernel", "recurrent_kernels"),
    )
]


@pytest.fixture(scope="module", autouse=True)
def wheel():
    """The library of ONNX Runtime's operators for every level."""
    for level in compiling.LEVELS:
        build(OPERATORS, level)


def run_tests(processor: Processor, *arguments: str, torch: bool = False) -> int:
    """Run tests on a processor; returns how many passed."""
    options = ("-q", "-x", "-p", "emulation.libraries", "-p", "no:cacheprovider", "-m", "not slow and not campaign")
    done = processor.run("-m", "pytest", *options, *arguments, torch=torch, timeout=3600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return int(re.search(r"(\d+) passed", done.stdout)[1])


@each_processor
def test_the_tests_of_kernels_pass(processor):
    assert SUITE
    assert run_tests(processor, *map(str, SUITE), torch=True) >= 60  # some compare with PyTorch


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What training ends with on each processor, and the library that it took there."""
    folder = tmp_path_factory.mktemp("trained")
    results = {}
    for processor in PROCESSORS:
        file = folder / f"{processor.level.name}.npz"
        done = processor.run("-m", "emulation.train", str(file))
        assert done.returncode == 0, done.stderr[-2000:]
        with np.load(file) as arrays:
            results[processor] = done.stdout.strip(), dict(arrays)
    return results


@each_processor
def test_a_wheel_has_a_library_that_the_processor_takes(processor, trained):
    level = next(level for level in compiling.LEVELS if level.name == EXPECTED[processor])
    assert trained[processor][0] == compiling.library_name(OPERATORS, level)


@pytest.mark.parametrize("processor", [NEON, SSE], ids=["neon", "sse"])
def test_training_comes_to_the_numbers_of_another_processor(processor, trained):
    actual, expected = trained[processor][1], trained[AVX2][1]
    np.testing.assert_allclose(actual["losses"], expected["losses"], rtol=1e-5)
    for name, array in expected.items():
        difference = np.linalg.norm((actual[name] - array).astype(np.float64))
        assert difference <= 1e-4 * np.linalg.norm(array.astype(np.float64)) + 1e-6, name


def test_instructions_that_a_processor_has_not_end_a_process(tmp_path):
    """No more is emulated than is said: else the tests above would prove nothing."""
    file = tmp_path / "state.npz"
    script = (
        "import sys; from pathlib import Path; from emulation import train; from burnish.kernels import building;"
        "building.find_installed = lambda *_: Path(sys.argv[1]); train.main(sys.argv[2])"
    )
    done = SSE.run("-c", script, str(build(OPERATORS, AVX2.level)), str(file))
    assert done.returncode in (-signal.SIGILL, 128 + signal.SIGILL), done.stderr[-2000:]
    assert not file.exists()


@pytest.fixture(scope="module")
def torch_kernels():
    """The libraries of the PyTorch engine's kernels for Arm."""
    for source in TORCH_KERNELS:
        build(source, NEON.level)


def test_the_tests_of_pytorchs_kernels_pass(torch_kernels):
    # Batch normalization with an epsilon of 0, which this older PyTorch refuses.
    newer = ("-k", "not test_a_network_trains_alike_with_and_without")
    assert run_tests(NEON, *map(str, TORCH_SUITE), *newer, torch=True) >= 600
