"""A campaign on a GPU: tests, measures and writes down, in stages, the most valuable first.

    python benchmarks/gpu.py                               on the GPU, within 480 s; the results in runs/gpu.json
    python benchmarks/gpu.py --resume --budget 200         measure what a run before had no time for
    python benchmarks/gpu.py --stages speed,memory --budget 300 --output speed.json
    python benchmarks/gpu.py --table runs/gpu.json         print the table of a file
    python benchmarks/gpu.py --device cpu --tiny           each stage end to end without a GPU, in tiny sizes

It runs from the source tree without an installation and needs PyTorch 2.11 or later, onnx, onnx-ir, numpy, safetensors, rich
and typer. The file is written after every case, so that a run that is cut off keeps what it had. The exit code is 1 where
something failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDERS = [str(HERE), str(HERE / "peers"), str(HERE.parent / "src"), str(HERE.parent / "tests")]
sys.path[:0] = [folder for folder in FOLDERS if folder not in sys.path]

from gpu_stages.campaign import STAGES, Campaign, failures, read  # noqa: E402
from gpu_stages.setting import Setting  # noqa: E402
from gpu_stages.table import table  # noqa: E402

# Where GPUs are lent for fifteen minutes, the start included, and a command may take ten: a second one of 200 s comes after it.
BUDGET = 480.0


def prepare_environment() -> None:
    """Set what processes of stages find: where modules lie, and that burnish's own kernels, of the CPU, stay unbuilt."""
    before = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in FOLDERS]
    os.environ["PYTHONPATH"] = os.pathsep.join([*FOLDERS, *before])
    os.environ["BURNISH_KERNELS"] = "off"
    # Where a process was ended, its programs would compile once more.
    os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")


def arguments_of(command_line: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, which say nothing of speed")
    parser.add_argument("--stages", help=f"some of {','.join(stage.name for stage in STAGES)}; all where left out")
    parser.add_argument("--budget", type=float, default=BUDGET, metavar="SECONDS", help="for all stages")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu.json"))
    parser.add_argument("--resume", action="store_true", help="keep what --output has, and measure what it lacks")
    parser.add_argument("--table", type=Path, metavar="JSON", help="print the table of this file, and run nothing")
    arguments = parser.parse_args(command_line)
    wanted = [stage.name for stage in STAGES] if arguments.stages is None else arguments.stages.split(",")
    unknown = [name for name in wanted if name not in {stage.name for stage in STAGES}]
    if unknown:
        parser.error(f"--stages: there is no stage {', '.join(unknown)}; there are {', '.join(stage.name for stage in STAGES)}")
    if arguments.budget <= 0:
        parser.error("--budget: give a number of seconds above 0")
    arguments.chosen = [stage for stage in STAGES if stage.name in wanted]
    return arguments


def main(command_line: list[str] | None = None) -> int:
    arguments = arguments_of(command_line)
    if arguments.table is not None:
        print(table(read(arguments.table)), end="")
        return 0
    prepare_environment()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the stage that runs is ended as well
    campaign = Campaign(Setting(arguments.device, arguments.tiny), arguments.budget, arguments.output, arguments.resume)
    document = campaign.run(arguments.chosen)
    print(table(document), end="")
    failed = failures(document)
    for failure in failed:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
