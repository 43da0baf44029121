"""Differentiate an ONNX graph, run the result on onnxruntime, and compare it with differences of the function's values.

python examples/gradients_of_any_graph.py
"""

import numpy as np
import onnx
import onnx_ir
import onnxruntime

import burnish

GRAPH = """
<ir_version: 8, opset_import: ["": 18]>
soft_saturation (double[n, 3] x, double[3, 2] w) => (double[n, 2] y) {
    scores = MatMul(x, w)
    bounded = Tanh(scores)
    y = Mul(bounded, scores)
}
"""


def main() -> None:
    model = onnx.parser.parse_model(GRAPH)
    gradients = burnish.grad(model, wrt=["x", "w"], of="y")
    print("inputs: ", ", ".join(str(value.name) for value in gradients.graph.inputs))
    print("outputs:", ", ".join(str(value.name) for value in gradients.graph.outputs))

    generator = np.random.default_rng(0)
    x, w, cotangent = generator.normal(size=(4, 3)), generator.normal(size=(3, 2)), generator.normal(size=(4, 2))
    proto = onnx_ir.to_proto(gradients)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    dx, dw = session.run(["grad:x", "grad:w"], {"x": x, "w": w, "cotangent:y": cotangent})

    function = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])

    def value(x: np.ndarray, w: np.ndarray) -> float:
        (y,) = function.run(None, {"x": x, "w": w})
        return float((y * cotangent).sum())

    # Along a random direction the derivative is the inner product of that direction with the gradient.
    along_x, along_w, distance = generator.normal(size=x.shape), generator.normal(size=w.shape), 1e-6
    difference = value(x + distance * along_x, w + distance * along_w) - value(x - distance * along_x, w - distance * along_w)
    by_differences = difference / (2 * distance)
    by_gradient = float((dx * along_x).sum() + (dw * along_w).sum())
    print(f"derivative by differences {by_differences:.8f}, by the gradient {by_gradient:.8f}")
    np.testing.assert_allclose(by_gradient, by_differences, rtol=1e-6)


if __name__ == "__main__":
    main()
