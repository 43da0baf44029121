"""``burnish export --with-preprocessing``: the file reads decoded images, and says what ``predict`` says of the run."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from PIL import Image


@pytest.mark.slow
def test_the_file_says_of_decoded_images_what_the_run_says_of_files(folder, run):
    for name in ("dark", "dim", "light"):
        (folder / "images" / name).mkdir(parents=True)
        for number in range(3):
            shade = {"dark": 20, "dim": 120, "light": 220}[name] + np.arange(5 * 6 * 3).reshape(5, 6, 3) % 30
            Image.fromarray(shade.astype(np.uint8)).save(folder / "images" / name / f"{number}.png")
    options = ["--epochs", "2", "--output", "run", "--batch-size", "3", "--pixels", "-1..1"]
    done = run("train", "model.onnx", "--data", "images", *options)
    assert "waiting for data: " in done.output
    done = run("export", "run", "--output", "whole.onnx", "--with-preprocessing")
    assert (
        "reads RGB images as uint8 [batch, height, width, 3]; in the model: resized to 4 x 4 (bilinear), gray, NCHW"
        in done.output
    )
    run("predict", "run", "images", "--output", "said.npz")
    session = onnxruntime.InferenceSession("whole.onnx", providers=["CPUExecutionProvider"])
    (entry,) = session.get_inputs()
    assert (entry.name, entry.type, entry.shape[1:]) == ("x", "tensor(uint8)", ["height", "width", 3])
    images = [np.asarray(Image.open(path)) for path in sorted((folder / "images").rglob("*.png"))]
    found = np.concatenate([session.run(None, {"x": image[None]})[0] for image in images])
    with np.load("said.npz") as said:
        np.testing.assert_allclose(found, said["logits"], rtol=0, atol=0.05)  # where a pixel differs by 1 of 255
        done = run("predict", "whole.onnx", "images", "--output", "again.npz")
        assert "pixels: resized to 4 x 4 (bilinear), RGB, NHWC, values pixel" in done.output
        with np.load("again.npz") as again:
            np.testing.assert_allclose(again["logits"], said["logits"], rtol=0, atol=0.05)
    done = run("export", "run", "--output", "x.onnx", "--with-preprocessing", "--training", code=2)
    assert "leave out --with-preprocessing" in done.output


def test_a_run_on_numbers_has_no_preprocessing(folder, run):
    run("train", "model.onnx", "--data", "data.npz", "--output", "run")
    done = run("export", "run", "--output", "whole.onnx", "--with-preprocessing", code=1)
    assert "does not say what is done to its pixels, as it was trained on numbers" in done.output
    assert not (folder / "whole.onnx").exists()
