"""Wrong inputs of every command and of the main calls in Python: the sentence that each is refused with."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper
from typer.testing import CliRunner

import burnish
from burnish.cli.application import app
from burnish.cli.console import LONGEST_FIRST_LINE, message_lines
from burnish.errors import BurnishError
from burnish.models import residual_network

REMEDY = re.compile(
    r"\b(add|begin|check|choose|compile|convert|did you mean|expected|export|fill|give|go on|it has|it takes|its inputs are|"
    r"leave|let|look|lower|make|must be|name|needs|number the|put|remove|repair|replace|resize|save|start|take|train|use|"
    r"write)\b",
    re.IGNORECASE,
)
"""A word that says what to do, or which names there are."""


def save_perceptron(path: str, outputs: int = 3, dtype: type = np.float32) -> None:
    """Save ``y = x W + b`` of two inputs."""
    weights = {"W": np.ones((2, outputs), dtype), "b": np.zeros(outputs, dtype)}
    save_model(path, [("MatMul", ["x", "W"], ["a"]), ("Add", ["a", "b"], ["y"])], outputs, weights)


def save_model(path: str, nodes: list[Any], outputs: int, weights: dict[str, np.ndarray], domain: str = "") -> None:
    kind = helper.np_dtype_to_tensor_dtype(next(iter(weights.values())).dtype if weights else np.dtype(np.float32))
    graph = helper.make_graph(
        [helper.make_node(*node, domain=domain) for node in nodes],
        "graph",
        [helper.make_tensor_value_info("x", kind, ["batch", 2])],
        [helper.make_tensor_value_info("y", kind, ["batch", outputs])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", 18), *([helper.make_opsetid(domain, 1)] if domain else [])]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)


def save_images(folder: str, classes: tuple[str, ...], content: bytes | None = None) -> None:
    image = pytest.importorskip("PIL.Image")
    for name in classes:
        Path(folder, name).mkdir(parents=True)
        for number in range(2):
            path = Path(folder, name, f"{number}.png")
            if content is None:
                image.new("L", (8, 8), 90 * number).save(path)
            else:
                path.write_bytes(content)


def save_broken_models() -> None:
    Path("empty.onnx").touch()
    Path("text.onnx").write_text("no model")
    whole = Path("model.onnx").read_bytes()
    Path("cut.onnx").write_bytes(whole[: len(whole) // 2])
    Path("folder.onnx").mkdir()
    Path("folder").mkdir()
    save_perceptron("whole.onnx", dtype=np.int64)
    save_model("weightless.onnx", [("Relu", ["x"], ["y"])], 2, {})
    weights = {"W": np.ones((2, 3), np.float32)}
    save_model("custom.onnx", [("Mystery", ["x", "W"], ["y"])], 3, weights, domain="com.acme")


def save_arrays() -> None:
    images, labels = np.zeros((6, 4, 4), np.float32), np.array([0, 1, 2, 2, 1, 0])
    arrays: dict[str, tuple[np.ndarray, np.ndarray]] = {
        "high": (images, labels + 1),
        "low": (images, labels - 1),
        "nan": (images * np.nan, labels),
        "uneven": (images, labels[:3]),
        "narrow": (np.zeros((6, 3), np.float32), labels),
        "rank": (np.zeros((6, 4, 4, 4, 4), np.float32), labels),
        "none": (images[:0], labels[:0]),
        "words": (np.array([["a", "b"]] * 6), labels),
        "parts": (images, labels + 0.5),
        "objects": (np.array([{}, {}], dtype=object), labels[:2]),
        "data": (np.random.default_rng(0).normal(size=(20, 4, 4)).astype(np.float32), np.arange(20) % 3),
        "rows": (np.random.default_rng(0).normal(size=(20, 2)).astype(np.float32), np.arange(20) % 3),
    }
    for name, (x, y) in arrays.items():
        np.savez(f"{name}.npz", x=x, y=y)
    np.savez("unlabelled.npz", x=images)
    Path("broken.npz").write_bytes(b"PK\x03\x04 no archive")
    Path("empty.npz").touch()


TABLES = {
    "table": "a,b,label\n" + "1,2,u\n2,1,v\n3,3,w\n" * 3,
    "empty": "",
    "header": "a,b,label\n",
    "headerless": "1.5,2.25,u\n2,1,v\n" * 4,
    "gap": "a,b,label\n1,,u\n2,1,v\n3,3,w\n",
    "missing_value": "a,b,label\n1,nan,u\n2,1,v\n3,3,w\n",
    "wide": "a,b,c,label\n1,2,3,u\n2,1,3,v\n3,3,3,w\n",
    "ragged": "a,b,label\n1,2,u\n2,1\n3,3,w\n",
    "twice": "a,a,label\n1,2,u\n2,1,v\n3,3,w\n",
    "classes": "a,b,label\n" + "".join(f"1,2,class{number}\n" for number in range(5)),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models, data, a run and a program, whole ones and broken ones."""
    folder, before = tmp_path_factory.mktemp("wrong"), Path.cwd()
    os.chdir(folder)
    try:
        ir.save(residual_network((1, 4, 4), classes=3, width=2, blocks=(1,)), "model.onnx")
        save_perceptron("mlp.onnx")
        save_perceptron("one.onnx", outputs=1)
        save_broken_models()
        save_arrays()
        for name, text in TABLES.items():
            Path(f"{name}.csv").write_text(text)
        Path("latin.csv").write_bytes("a,b,label\n1,2,gr\xfcn\n2,1,v\n".encode("latin-1"))
        Path("broken.parquet").write_bytes(b"PAR1 no parquet")
        Path("notes.docx").write_text("x")
        Path("file").write_text("a file")
        save_images("photos", ("ant", "bee", "cat"))
        save_images("single", ("ant",))
        save_images("fakes", ("ant", "bee", "cat"), b"no picture")
        Path("flat").mkdir()
        for picture in Path("photos/ant").iterdir():
            Path("flat", picture.name).write_bytes(picture.read_bytes())
        Path("nothing").mkdir()
        burnish.compile("model.onnx").save("program")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            done = CliRunner().invoke(app, ["train", "model.onnx", "--data", "data.npz", "--output", "runs/done"])
        assert done.exit_code == 0, done.output
    finally:
        os.chdir(before)
    return folder


@pytest.fixture(autouse=True)
def in_place(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(place)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


TRAIN = "train model.onnx --data data.npz --output new"
TABLE = "train mlp.onnx --output new --data"
TUNE = "finetune model.onnx --data data.npz --output new"
PREDICT = "predict runs/done data.npz"

COMMANDS = [
    # The model.
    ("train missing.onnx --data data.npz", 1, "there is no file 'missing.onnx': check the path"),
    ("finetune missing.onnx --data data.npz", 1, "there is no file 'missing.onnx': check the path"),
    ("predict missing.onnx data.npz", 1, "there is no file 'missing.onnx': check the path"),
    ("inspect missing.onnx", 1, "there is no file 'missing.onnx': check the path"),
    ("quantize missing.onnx --data data.npz -o q.onnx", 1, "there is no file 'missing.onnx': check the path"),
    ("train empty.onnx --data data.npz", 1, "'empty.onnx': the model is empty (0 bytes). Export the model again, or check"),
    ("train text.onnx --data data.npz", 1, "'text.onnx': not an ONNX model, or a corrupt one"),
    ("train cut.onnx --data data.npz", 1, "'cut.onnx': not an ONNX model, or a corrupt one"),
    ("check data.npz", 1, "'data.npz': not an ONNX model, or a corrupt one"),
    ("train folder --data data.npz", 1, "'folder' is a folder: give the path of the .onnx file in it"),
    ("compile folder.onnx -o p", 1, "'folder.onnx' is a folder: give the path of the .onnx file in it"),
    ("train runs/done --data data.npz", 1, "'runs/done' is the folder of a run: go on with the run by its own command"),
    ("finetune program --data data.npz", 2, "'program' is a compiled program, whose head cannot be replaced: give the ONNX"),
    ("compile program -o p", 1, "'program' is a program that is compiled already: train it (burnish train program)"),
    ("train weightless.onnx --data rows.npz", 1, "nothing would train: the model has no weights, that is floating-point"),
    ("train whole.onnx --data rows.npz", 1, "nothing would train: the model has no weights, that is floating-point"),
    ("finetune weightless.onnx --data rows.npz", 1, "nothing before the output 'y' has weights: give the output of a classifier"),
    ("check custom.onnx", 1, "Mystery"),
    ("predict folder data.npz", 1, "'folder' holds no latest.safetensors: the run has not saved anything yet, or this is"),
    ("predict runs/none data.npz", 1, "there is no file 'runs/none': check the path"),
    # Data.
    ("train model.onnx --data missing.npz", 1, "missing.npz: no such file or folder; check the path. Data are digits"),
    ("train model.onnx --data digit", 1, "digit: no such file or folder (did you mean 'digits'?); check the path"),
    ("train model.onnx --data notes.docx", 1, "notes.docx: burnish does not read '.docx' files; give data in another form"),
    ("predict model.onnx file", 1, "file: burnish does not read files without a suffix; give data in another form"),
    ("train model.onnx --data nothing", 1, "nothing: no images; put them into one subfolder per class"),
    ("finetune model.onnx --data flat", 1, "flat: no images in subfolders; its 2 images lie in no class: put them into one"),
    ("finetune model.onnx --data single", 1, "single: all samples have the class 'ant', and nothing can be told apart: give"),
    ("finetune model.onnx --data fakes", 1, "fakes: no image of the class 'ant' can be read: fakes/ant/0.png"),
    ("predict model.onnx fakes", 1, "fakes/ant/0.png: damaged, or no image (no format that is read); repair or remove it"),
    ("train model.onnx --data broken.npz", 1, "broken.npz: damaged, or no .npz file"),
    ("train model.onnx --data empty.npz", 1, "empty.npz: damaged, or no .npz file"),
    ("train model.onnx --data high.npz", 1, "high.npz: sample 2 has the label 3, and 'labels' takes 0 to 2; number the classes"),
    ("train model.onnx --data low.npz", 1, "low.npz: sample 0 has the label -1, and 'labels' takes 0 to 2; number the classes"),
    ("train model.onnx --data nan.npz", 1, "nan.npz: sample 0 holds a NaN or infinite value for input 'x'; remove or repair it"),
    ("train model.onnx --data uneven.npz", 1, "uneven.npz: the arrays differ in their number of samples: 'x' 6, 'labels' 3"),
    ("train model.onnx --data narrow.npz", 1, "narrow.npz: 'x' wants samples of shape [1, 4, 4], and those of the data have"),
    ("train model.onnx --data rank.npz", 1, "those of the data have shape [4, 4, 4, 4]; resize or rearrange the data"),
    ("train model.onnx --data none.npz", 1, "the data set is empty: its arrays have 0 samples; give data with samples"),
    ("train model.onnx --data unlabelled.npz", 1, "unlabelled.npz: no array 'labels' or 'y' with the labels; the file has"),
    ("train mlp.onnx --data words.npz", 1, "words.npz: input 'x' is to be filled with values of dtype <U1; give numbers"),
    ("train model.onnx --data parts.npz", 1, "parts.npz, sample 0: 'labels' takes int64, and the data hold 0.5: give whole"),
    ("train model.onnx --data objects.npz", 1, "objects.npz: holds Python objects, or is no .npz file; burnish never unpickles"),
    (f"{TRAIN} --eval-data missing.npz", 1, "missing.npz: no such file or folder; check the path"),
    (
        f"{TRAIN} --loss mse",
        1,
        "data.npz: 'targets' wants samples of shape [3], and those of the data have shape []; choose a loss",
    ),
    (f"{TABLE} empty.csv", 1, "empty.csv: empty; the first line has to name the columns"),
    (f"{TABLE} header.csv", 1, "header.csv: no rows; add samples"),
    (f"{TABLE} headerless.csv", 1, "headerless.csv: the first line has to name the columns, and reads like a sample"),
    (f"{TABLE} ragged.csv", 1, "ragged.csv, line 3: 2 values, and the header names 3 columns; repair the line or remove it"),
    (f"{TABLE} wide.csv", 1, "wide.csv: 'x' wants samples of shape [2], and those of the data have shape [3]"),
    (f"{TABLE} twice.csv", 1, "twice.csv: two columns are called 'a'; give every column its own name"),
    (f"{TABLE} classes.csv", 1, "classes.csv: 5 classes (class0 ... class4), and the model has 3; take a model with as many"),
    (f"{TABLE} latin.csv", 1, "latin.csv: no CSV file in UTF-8"),
    (f"{TABLE} broken.parquet", 1, "broken.parquet: damaged, or no Parquet file"),
    (f"{TABLE} table.csv --label lable", 1, "table.csv: no column 'lable' (did you mean 'label'?); choose among a, b, label"),
    (f"{TRAIN} --label y", 2, "--label y names the column of a table (.csv, .parquet) that holds the labels, and 'data.npz' is"),
    ("evaluate model.onnx data.npz", 1, "the model 'model.onnx' does not say which loss it was trained on: name one"),
    ("predict model.onnx narrow.npz", 1, "narrow.npz: 'x' wants samples of shape [1, 4, 4]"),
    ("compare model.onnx --data missing.npz", 1, "missing.npz: no such file or folder; check the path"),
    # Names with a near miss.
    (f"{TRAIN} --loss cross_entrpy", 1, "there is no loss 'cross_entrpy' (did you mean 'cross_entropy'?)"),
    (f"{TRAIN} --optimizer adamww", 1, "there is no optimizer 'adamww' (did you mean 'adamw'?)"),
    (f"{TRAIN} --optimizer adam:beta=1", 1, "optimizer 'adam' has no option 'beta' (did you mean 'betas'?); it takes lr"),
    (f"{TRAIN} --metrics acuracy", 1, "there is no metric 'acuracy' (did you mean 'accuracy'?)"),
    (f"{TRAIN} --schedule cosin", 1, "there is no learning-rate schedule 'cosin' (did you mean 'cosine'?)"),
    (f"{TRAIN} --norm frozn", 1, "there is no norm policy 'frozn' (did you mean 'frozen'?)"),
    (f"{TRAIN} --augment flop", 1, "augment: there is no 'flop' (did you mean 'flip'?); give crop, flip"),
    (f"{TRAIN} --engine onxruntime", 1, "There is no engine 'onxruntime' (did you mean 'onnxruntime'?). Choose among"),
    (f"{TRAIN} --log tensorbord", 1, "there is no such logger (did you mean 'tensorboard'?); give tensorboard, mlflow"),
    (f"{TRAIN} --adapter lore", 1, "lora: variant='lore' (did you mean 'lora'?): choose among 'lora', 'dora', 'ia3'"),
    (f"{TUNE} --head nwe", 1, "head='nwe' (--head): give 'auto', 'new', 'keep' (did you mean 'new'?)"),
    (f"{TUNE} --quantize int7", 1, "quantize='int7': there is no such form (did you mean 'int8'?): give int8 or int4"),
    (f"{TRAIN} --precision float8", 1, "precision: unknown 'float8'; choose among 'float32', 'float16', 'bfloat16'"),
    (f"{TRAIN} --reinitialize kaming", 1, "reinitialize='kaming' is not a scheme: choose one of kaiming"),
    (f"{TRAIN} --trainable nothing*", 1, "trainable: 'nothing*' matches no weight of the model; did you mean"),
    (f"{TRAIN} --outputs scores", 1, "outputs: the model has no output 'scores'; it has 'logits'"),
    (f"{TRAIN} --bind y=1", 1, "bind: the model has no input 'y'; its inputs are 'x'"),
    (f"{TRAIN} --best-metric acc", 1, "best_metric: the program reports no 'acc'; it reports 'accuracy', 'loss'"),
    (f"{TUNE} --freeze-until nothing", 1, "freeze_until='nothing' is no node, and no name or pattern of a weight: give 'head'"),
    (f"{PREDICT} --activation softmx", 1, "activation: there is no 'softmx'; choose among softmax, sigmoid, none"),
    (f"{PREDICT} --outputs nothing", 1, "outputs: the model has no output 'nothing'; it has 'logits'"),
    ("evaluate model.onnx data.npz --loss mss", 1, "there is no loss 'mss' (did you mean 'mse'?)"),
    ("compile model.onnx -o p --target tpu", 1, "target: unknown 'tpu'; choose among 'onnxruntime', 'web', 'webgpu'"),
    ("compare model.onnx --engines onnxruntime,abacus", 1, "There is no engine 'abacus'. Choose among onnxruntime"),
    ("quantize model.onnx --data data.npz -o q.onnx --weights int3", 1, "quantize: weights='int3' is no format: give 'int8'"),
    ("package program -o pack --runtime rust", 1, "runtime: unknown 'rust'; choose among 'c', or leave it out"),
    ("passes model.onnx --stage LOWER", 1, "--stage: there is no stage 'LOWER'; choose among READ"),
    ("new cnnn --classes 3 --input 3x8x8 -o n.onnx", 1, "models.create: name must be 'mlp', 'cnn'"),
    # Numbers.
    (f"{TRAIN} --epochs 0", 2, "Invalid value for '--epochs'"),
    (f"{TRAIN} --epochs -1", 2, "give a number of 1 or more"),
    (f"{TRAIN} --epochs many", 2, "Invalid value for '--epochs'"),
    (f"{TRAIN} --batch-size 0", 2, "Invalid value for '--batch-size'"),
    (f"{TRAIN} --lr -0.1", 1, "sgd: lr must be a finite number that is not negative, not -0.1"),
    (f"{TRAIN} --lr nan", 1, "sgd: lr must be a finite number that is not negative, or a schedule"),
    (f"{TRAIN} --weight-decay -1", 1, "sgd: weight_decay must be a finite number that is not negative, not -1.0"),
    (f"{TRAIN} --seed -1", 2, "Invalid value for '--seed'"),
    (f"{TRAIN} --threads 0", 2, "Invalid value for '--threads'"),
    (f"{TRAIN} --step-timeout 0", 1, "step_timeout=0.0: give a number of seconds above 0, or leave it out for no limit"),
    (f"{TRAIN} --lora rank=0", 1, "lora: rank=0: give a whole number of 1 or more"),
    (f"{TRAIN} --memory 1kB", 1, "memory: a step does not fit 1.0 kB at batch 32: planned are"),
    ("train model.onnx --data photos --image-size 0 0", 1, "pixels: size=(0, 0): give height and width in pixels"),
    (f"{TUNE} --patience 0", 2, "Invalid value for '--patience'"),
    (f"{PREDICT} --top 0", 2, "Invalid value for '--top'"),
    (f"{PREDICT} --score 2", 1, "score=2.0: give a number from 0 to 1, such as 0.25"),
    ("check model.onnx --probes 0", 2, "Invalid value for '--probes'"),
    ("compare model.onnx --steps 0", 2, "Invalid value for '--steps'"),
    ("demo --epochs 0", 2, "Invalid value for '--epochs'"),
    ("new cnn --classes 0 --input 3x8x8 -o n.onnx", 2, "Invalid value for '--classes'"),
    ("new cnn --classes 3 --input 64 -o n.onnx", 1, "cnn: input_shape=(64,) has 1 dimension; give (channels, height, width)"),
    ("new cnn --classes 3 --input axb -o n.onnx", 2, "--input axb: give whole numbers with x between, such as 3x64x64"),
    # Options that are missing, of another command, or exclude each other.
    ("train", 2, "Missing argument 'MODEL'"),
    ("train model.onnx", 2, "Missing option '--data'"),
    ("trian model.onnx", 2, "No such command 'trian'. Did you mean 'train'?"),
    (f"{TRAIN} extra", 2, "unexpected extra argument"),
    (f"{TRAIN} --epoch 3", 2, "burnish train has no option --epoch (did you mean '--epochs'?)"),
    (f"{TRAIN} --freeze-until head", 2, "burnish train has no option --freeze-until; it is one of burnish finetune"),
    (f"{TUNE} --optimizer adam", 2, "burnish finetune has no option --optimizer; it is one of burnish train"),
    (f"{TRAIN} --resume --overwrite", 2, "--resume goes on with a run and --overwrite drops it; give one of them"),
    (f"{TRAIN} --recompute layers --memory 1MB", 1, "memory and recompute are both given"),
    (f"{TRAIN} --rank 4", 2, "--rank is that of an --adapter: give --adapter lora too"),
    (f"{TRAIN} --nodes 2", 2, "--nodes 2: --node-rank is missing: give every machine its own --node-rank"),
    (f"{TRAIN} --deterministic", 2, "--deterministic says how workers exchange, and one alone trains here: give --workers 2"),
    (f"{TRAIN} --bind x", 2, "--bind x: write NAME=VALUE, such as 'sr=16000' or 'state=0'"),
    (f"{TRAIN} --batch 8", 2, "--batch 8: the only choice is 'open'"),
    (f"{TRAIN} --tokenizer missing.json", 1, "data.npz: a tokenizer makes tokens of texts, and these data hold none: leave it"),
    (f"{TRAIN} --device cuda", 1, "The onnxruntime engine runs on device 'cpu' only, not on 'cuda': leave device out"),
    (f"{TUNE} --quantize int8 --adapter lora", 1, "quantize: integers are trained in the weights, and with adapters these"),
    (f"{TUNE} --save-adapters peft", 2, "--save-adapters: the run trains no adapters: give --adapter lora, or leave it out"),
    ("compile model.onnx -o p --schedule linear", 2, "--schedule linear needs to know its steps: give --steps"),
    ("compile model.onnx -o p --loss mse --metrics accuracy", 1, "accuracy compares classes or yes-or-no answers"),
    ("predict model.onnx data.npz --best", 1, "best: 'model.onnx' is one model: leave it out"),
    ("evaluate runs/done data.npz --loss mse", 1, "loss: 'runs/done' is of a program, compiled with its own: leave it out"),
    ("export runs/done -o x.onnx --training --with-preprocessing", 2, "--training writes the program as it is; leave out"),
    ("quantize model.onnx -o q.onnx", 2, "the ranges of activations are measured on data: give --data"),
    ("compare model.onnx --engines onnxruntime", 1, "engines: give two or more to compare"),
    ("train one.onnx --data table.csv", 1, "cross_entropy: the output 'y' of shape [batch,1] has one class along axis 1"),
    # Outputs.
    ("train model.onnx --data data.npz -o file", 1, "--output: 'file' is a file: give the name of a folder"),
    ("train model.onnx --data data.npz -o file/run", 1, "is a file, and no folder: choose another place"),
    (f"{TRAIN} --export folder", 1, "--export: 'folder' is a folder: give the name of a file"),
    (f"{TRAIN} --export model.onnx", 1, "--export: 'model.onnx' is read, and would be overwritten: give the name of another"),
    (f"{PREDICT} -o predictions.txt", 2, "--output predictions.txt: predictions are written as"),
    ("export runs/done -o folder", 1, "--output: 'folder' is a folder: give the name of a file"),
    ("report runs/done -o folder", 1, "--output: 'folder' is a folder: give the name of a file"),
    ("new cnn --classes 3 --input 3x8x8 -o model.onnx", 1, "'model.onnx' is there already: replace it (--overwrite)"),
    ("new cnn --classes 3 --input 3x8x8 -o n.txt", 2, "--output n.txt: a model is written as .onnx"),
    # Runs and checkpoints.
    ("train model.onnx --data data.npz --resume -o nowhere", 1, "nothing to resume in 'nowhere'"),
    ("train mlp.onnx --data rows.npz --resume -o runs/done", 1, "was made with another program: missing 'param/W'"),
    (f"{TRAIN} --start-from nowhere", 1, "There is no checkpoint 'nowhere': check the path, or start without it"),
    (f"{TRAIN} --start-from data.npz", 1, "'data.npz' is not a whole checkpoint: it is truncated, damaged or another kind"),
    (f"{TRAIN} --config missing.toml", 1, "--config 'missing.toml' cannot be read"),
    ("export missing -o x.onnx", 1, "'missing': there is no such run or checkpoint; give the folder that burnish train wrote"),
    ("export model.onnx -o x.onnx", 1, "'model.onnx' is a model already, not the run that trained it: give the folder of the"),
    ("package model.onnx -o pack", 1, "'model.onnx' is a model, not a program: compile it first"),
    ("report program", 1, "'program' is not the folder of a run: give the folder that burnish train or finetune wrote"),
]


@pytest.mark.parametrize(("line", "status", "sentence"), COMMANDS, ids=[line for line, _, _ in COMMANDS])
def test_a_wrong_command_line_is_refused_with_a_sentence(line: str, status: int, sentence: str) -> None:
    before = {path for path in Path().rglob("*") if "runs/done" not in str(path)}
    result = CliRunner().invoke(app, line.split(), catch_exceptions=True)
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == status, result.output
    first, *details = result.stderr.splitlines()
    assert first.startswith("error: "), result.stderr
    assert len(first) <= LONGEST_FIRST_LINE
    assert all(detail.startswith("  ") for detail in details)
    said = " ".join(result.stderr.split())
    assert sentence in said, result.stderr
    assert "Traceback" not in result.output
    assert REMEDY.search(said) or " usage: " in said or "lists the commands" in said
    assert {path for path in Path().rglob("*") if "runs/done" not in str(path)} == before


def program() -> burnish.Program:
    return burnish.compile("mlp.onnx")


def step(**changes: Any) -> Any:
    batch = {"x": np.zeros((4, 2), np.float32), "labels": np.array([0, 1, 2, 0])} | changes
    return burnish.Session(program()).step({name: value for name, value in batch.items() if value is not None})


ROWS = np.zeros((4, 2), np.float32), np.array([0, 1, 2, 0])

CALLS: list[tuple[str, Callable[[], Any], str]] = [
    ("load a path", lambda: burnish.load("missing.onnx"), "there is no file 'missing.onnx': check the path"),
    ("load bytes", lambda: burnish.load(b"no model"), "the bytes: not an ONNX model, or a corrupt one"),
    ("load a number", lambda: burnish.load(3), "a model cannot be loaded from int: give the path of an ONNX file, its bytes"),
    ("compile nothing", lambda: burnish.compile(None), "a model cannot be loaded from NoneType: give the path"),
    ("an option", lambda: burnish.compile("mlp.onnx", optimiser="sgd"), "compile has no option 'optimiser' (did you mean"),
    (
        "a loss",
        lambda: burnish.compile("mlp.onnx", loss="huber:delt=1"),
        "loss 'huber' has no option 'delt' (did you mean 'delta'",
    ),
    ("a loss of a number", lambda: burnish.compile("mlp.onnx", loss=3), "a loss is a name or an object of burnish.losses, not 3"),
    ("a metric", lambda: burnish.compile("mlp.onnx", metrics=["acuracy"]), "no metric 'acuracy' (did you mean 'accuracy'?)"),
    ("a weight", lambda: burnish.compile("mlp.onnx", trainable=["Q"]), "trainable: 'Q' matches no weight of the model; did you"),
    ("a rate", lambda: burnish.optim.sgd(lr=-1), "sgd: lr must be a finite number that is not negative, not -1"),
    ("betas", lambda: burnish.optim.adam(betas=(1.5, 0.9)), "adam: betas[0] must be at least 0 and less than 1, not 1.5"),
    ("a session of a path", lambda: burnish.Session("mlp.onnx"), "A session opens a program, not a str: give what"),
    ("an engine", lambda: burnish.Session(program(), engine="onxruntime"), "There is no engine 'onxruntime' (did you mean"),
    ("threads", lambda: burnish.Session(program(), threads=0), "threads=0: give a whole number from 1 to 1024"),
    ("no labels", lambda: step(labels=None), "The batch lacks the input 'labels' (int64 of shape [batch]): add it to the batch"),
    ("another input", lambda: step(z=ROWS[1]), "The batch has an unexpected input 'z': expected 'x', 'labels'; leave it out"),
    ("texts", lambda: step(x=ROWS[0].astype(str)), "The input 'x' has dtype <U32, which is not numeric: give float32 of shape"),
    ("a rank", lambda: step(x=ROWS[0][0]), "The input 'x' has 1 dimensions, and the program takes 2: expected shape"),
    ("a shape", lambda: step(x=np.zeros((4, 3), np.float32)), "The input 'x' has extent 3 along axis 1, and the program takes 2"),
    ("too few labels", lambda: step(labels=ROWS[1][:2]), "The inputs 'x' and 'labels' disagree about 'batch': 4 and 2"),
    ("a label", lambda: step(labels=ROWS[1] + 9), "The input 'labels' holds 9 at [0], out of range: valid are 0..2"),
    ("labels of floats", lambda: step(labels=ROWS[1] + 0.5), "The input 'labels' has dtype float64, expected int64"),
    ("an empty batch", lambda: step(x=ROWS[0][:0], labels=ROWS[1][:0]), "The input 'x' is empty along axis 0 (got [0, 2])"),
    ("NaN", lambda: step(x=ROWS[0] * np.nan), "is nan. The state is kept as it was before this step"),
    ("an array", lambda: burnish.Session(program()).step(ROWS[0]), "A batch is a dict of arrays by input name, not a ndarray"),
    ("a checkpoint", lambda: burnish.Session(program()).restore("data.npz"), "'data.npz' is not a whole checkpoint"),
    ("a state", lambda: burnish.Session(program()).load_state({"a": ROWS[0]}), "The state does not fit the program: missing"),
    ("an export", lambda: burnish.Session(program()).export("folder"), "'folder' is a folder: give the name of a file"),
    ("a program", lambda: burnish.Program.load("folder"), "'folder' is not a saved program: it has no program.json. Give the"),
    ("a trainer of a path", lambda: burnish.Trainer("mlp.onnx", ROWS), "A trainer trains a program, not a str: give what"),
    ("a trainer's option", lambda: burnish.Trainer(program(), ROWS, epoch=3), "Trainer has no option 'epoch' (did you mean"),
    ("epochs", lambda: burnish.Trainer(program(), ROWS, epochs=0), "epochs=0: give a whole number of 1 or more"),
    ("no data", lambda: burnish.Trainer(program(), None), "no data set is made of a value of type NoneType: give (x, y)"),
    ("lengths", lambda: burnish.Trainer(program(), (ROWS[0], ROWS[1][:2])), "the arrays differ in their number of samples"),
    ("finetune", lambda: burnish.finetune("mlp.onnx", "missing"), "missing: no such file or folder; check the path"),
    ("its option", lambda: burnish.finetune("mlp.onnx", ROWS, optimizer="sgd"), "finetune has no option 'optimizer': see help"),
    ("a rank of lora", lambda: burnish.surgery.lora("mlp.onnx", rank=-1), "lora: rank=-1: give a whole number of 1 or more"),
    (
        "a new model",
        lambda: burnish.models.create("cnn", classes=0, input_shape=(3, 8, 8)),
        "cnn: classes must be a whole number",
    ),
    ("grad", lambda: burnish.grad("mlp.onnx", wrt=["Q"], of="y"), "wrt: the model has no input or initializer 'Q'; did you mean"),
]


@pytest.mark.parametrize(("call", "sentence"), [row[1:] for row in CALLS], ids=[row[0] for row in CALLS])
def test_a_wrong_call_raises_an_error_of_burnish_with_a_sentence(call: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(BurnishError) as raised:
        call()
    said = str(raised.value)
    assert sentence in said
    assert REMEDY.search(said)
    assert len(message_lines(said)[0]) <= LONGEST_FIRST_LINE


def test_the_table_has_ninety_wrong_inputs_over_all_commands() -> None:
    assert len(COMMANDS) >= 90
    assert {line.split()[0] for line, _, _ in COMMANDS} >= {name for name in dir_of_commands() if name != "doctor"}


def dir_of_commands() -> list[str]:
    from typer.main import get_command

    return list(get_command(app).commands)
