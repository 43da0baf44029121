"""Write what a client in another language needs: the program, and the digits of its partition as JSON.

python -m federated_digits.write_partition NUMBER CLIENTS FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from federated_digits.task import partition, program


def main(number: int, clients: int, folder: Path) -> None:
    program().save(folder / "program")
    data = {}
    for split in ("train", "test"):
        arrays = partition(number, clients, split)
        shape = list(arrays["x"].shape[1:])
        data[split] = {"shape": shape, "x": arrays["x"].reshape(-1).tolist(), "labels": arrays["labels"].tolist()}
    (folder / "data.json").write_text(json.dumps(data))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
