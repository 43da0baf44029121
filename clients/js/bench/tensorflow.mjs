// The benchmark's networks in TensorFlow.js, from the weights of their programs.
import "@tensorflow/tfjs-backend-cpu";
import * as wasm from "@tensorflow/tfjs-backend-wasm";
import * as tf from "@tensorflow/tfjs-core";
import "@tensorflow/tfjs-core/dist/register_all_gradients.js";

const LOGITS = {
  perceptron(x, { weight }) {
    let y = x;
    for (const name of ["first", "second"]) y = tf.relu(tf.add(tf.matMul(y, weight(`${name}.weight`)), weight(`${name}.bias`)));
    return tf.add(tf.matMul(y, weight("head.weight")), weight("head.bias"));
  },
  convolutional(x, { weight, kernel }) {
    const convolved = (y, name) => tf.relu(tf.add(tf.conv2d(y, kernel(`${name}.weight`), 1, "same"), weight(`${name}.bias`)));
    const y = convolved(tf.maxPool(convolved(x, "first"), 2, 2, "valid"), "second");
    return tf.add(tf.matMul(tf.mean(y, [1, 2]), weight("head.weight")), weight("head.bias"));
  },
};

/** Milliseconds of a step, and the first losses. */
export async function timeTensorFlow(backend, network, weights, batch, steps, wasmPath) {
  if (backend === "wasm") wasm.setWasmPaths(wasmPath);
  if (!(await tf.setBackend(backend))) throw new Error(`TensorFlow.js has no backend '${backend}' here`);
  await tf.ready();
  const variables = new Map();
  const once = (name, make) => {
    if (!variables.has(name)) variables.set(name, tf.tidy(() => tf.variable(make())));
    return variables.get(name);
  };
  const plain = (name) => tf.tensor(weights[name].data, weights[name].shape);
  const weight = (name) => once(name, () => plain(name));
  const kernel = (name) => once(name, () => tf.transpose(plain(name), [2, 3, 1, 0]));
  const images = tf.tensor(batch.x.data, batch.x.shape);
  const x = network === "convolutional" ? tf.transpose(images, [0, 2, 3, 1]) : images;
  const labels = tf.oneHot(tf.tensor1d([...batch.labels.data].map(Number), "int32"), 10);
  const loss = () => tf.losses.softmaxCrossEntropy(labels, LOGITS[network](x, { weight, kernel }));
  tf.tidy(() => loss());
  const optimizer = tf.train.momentum(0.01, 0.9);
  const step = async () => {
    const cost = optimizer.minimize(loss, true);
    const [value] = await cost.data();
    cost.dispose();
    return value;
  };
  const losses = [];
  for (let index = 0; index < 5; index++) losses.push(await step());
  const started = performance.now();
  for (let index = 0; index < steps; index++) await step();
  const milliseconds = (performance.now() - started) / steps;
  tf.disposeVariables();
  return { losses, milliseconds };
}
