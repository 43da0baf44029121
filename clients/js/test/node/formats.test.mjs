import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { readdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";

import { InputError } from "../../dist/index.js";
import { checkDigestNow, DIGEST } from "../../dist/digest.js";
import { sha256, Sha256, sha256Now } from "../../dist/hashes.js";
import { byCodePoints, parseJson, spacedJson } from "../../dist/json.js";
import { Message } from "../../dist/protobuf.js";
import { readSafetensors, writeSafetensors } from "../../dist/safetensors.js";
import { bfloat16Bits, emptyTensor, float16Bits, numberOfBfloat16, numberOfFloat16, scalar } from "../../dist/tensor.js";
import { combined, exactSum, roundedOnce, totalOf } from "../../dist/totals.js";
import { readTensor, tensorMessage } from "../../dist/onnx.js";
import { loadProgram, saveModel, Session } from "../../dist/index.js";
import { folderOf, python, temporaryFolder } from "../fixtures.mjs";

test("SHA-256, in parts of any size", async () => {
  for (const length of [0, 1, 55, 56, 63, 64, 65, 1000]) {
    const bytes = Uint8Array.from({ length }, (_, place) => (place * 37) % 256);
    const expected = createHash("sha256").update(bytes).digest("hex");
    assert.equal(await sha256(bytes), expected);
    for (const size of [1, 7, 64, 100]) {
      const hash = new Sha256();
      for (let place = 0; place < length; place += size) hash.update(bytes.subarray(place, place + size));
      assert.equal(hash.digest(), expected);
    }
    assert.equal(sha256Now(bytes.subarray(0, length >> 1), bytes.subarray(length >> 1)), expected);
  }
});

test("JSON is written as Python writes it, or refused by name", () => {
  const value = { b: [1, 0.5, 1e-5, 1.5e-300, -0.25, 2 ** 53], "é\n": { z: true, none: null }, "\u{1f600}": "\u007f\u2028", empty: {}, list: [] };
  const expected = python("-c", "import json, sys; print(json.dumps(json.loads(sys.argv[1])), end='')", JSON.stringify(value));
  assert.equal(spacedJson(value, "extra"), expected);
  assert.equal(spacedJson(-0, "zero"), "-0.0");
  assert.equal(spacedJson([2 ** 60, -(2 ** 53), 1e21, 0], "whole"), `[1152921504606846976, ${-(2 ** 53)}, 1e+21, 0]`);
  for (const [other, place] of [[{ a: [1, undefined] }, "extra.a[1] is undefined"], [{ a: NaN }, "extra.a is NaN"], [{ a: new Map() }, "extra.a is an object (Map)"], [{ a: 1n }, "extra.a is 1"], [new Float32Array(2), "extra is an object (Float32Array)"]]) {
    assert.throws(() => spacedJson(other, "extra"), (error) => error instanceof TypeError && error.message === place);
  }
  assert.ok(byCodePoints("\uffee", "\u{1f600}") < 0);
});

test("a key that comes twice in JSON is refused by name", () => {
  for (const text of ['{"a": [{"b": 1, "c": "}:{"}, {"b": 2}], "b": {"a": 1}}', '["a", "a"]', '"a:"', "1"]) assert.deepEqual(parseJson(text), JSON.parse(text));
  for (const text of ['{"a": 1, "\\u0061": 2}', '{"x": [{"a": {}, "b": "\\"", "a": 1}]}']) assert.throws(() => parseJson(text), /an object has the key "a" twice/);
  assert.throws(() => parseJson("{"), SyntaxError);
});

test("sixteen-bit numbers round to nearest, ties to even", () => {
  for (const [value, bits] of [[0, 0], [-0, 0x8000], [1, 0x3c00], [65504, 0x7bff], [65519, 0x7bff], [65520, 0x7c00], [2 ** -24, 1], [2 ** -25, 0], [1 + 2 ** -11, 0x3c00], [1 + 3 * 2 ** -11, 0x3c02], [-Infinity, 0xfc00]]) {
    assert.equal(float16Bits(value), bits, `${value}`);
  }
  for (let bits = 0; bits < 0x7c00; bits += 7) assert.equal(float16Bits(numberOfFloat16(bits)), bits);
  for (let bits = 0; bits < 0x7f80; bits += 7) assert.equal(bfloat16Bits(numberOfBfloat16(bits)), bits);
  assert.equal(bfloat16Bits(1 + 2 ** -8), 0x3f80);
  assert.equal(bfloat16Bits(1 + 3 * 2 ** -8), 0x3f82);
  assert.ok(Number.isNaN(numberOfFloat16(float16Bits(NaN))) && Number.isNaN(numberOfBfloat16(bfloat16Bits(NaN))));
});

test("safetensors of every dtype come back, and places that lie are refused", async () => {
  const arrays = new Map(
    ["float64", "int64", "float32", "int32", "uint32", "float16", "bfloat16", "int16", "uint16", "int8", "uint8", "bool"].map((dtype, index) => [`${dtype}/ä`, { ...emptyTensor(dtype, [2, index]), dtype }]),
  );
  const bytes = await writeSafetensors(arrays, { key: "wert" });
  const read = readSafetensors(bytes, "file");
  assert.deepEqual(read.arrays, arrays);
  const { [DIGEST]: digest, ...metadata } = read.metadata;
  assert.deepEqual(metadata, { key: "wert" });
  checkDigestNow(bytes, digest, () => new Error("another digest"));
  const lying = (from, to) => {
    const text = Buffer.from(bytes).toString("latin1").replace(from, to);
    return () => readSafetensors(Uint8Array.from(Buffer.from(text, "latin1")), "file");
  };
  assert.throws(lying('"F32","shape":[2,2]', '"F32","shape":[9,2]'), /does not fit its shape/);
  assert.throws(() => readSafetensors(bytes.subarray(0, bytes.length - 1), "file"), /ends/);
  assert.throws(() => readSafetensors(Uint8Array.of(255, 255, 255, 255, 255, 255, 255, 127), "file"), /header ends behind the file/);
});

test("protobuf messages and tensors come back", () => {
  const inner = new Message().addText(1, "größe").addInteger(2, -1);
  const message = Message.read(new Message().addInteger(3, 2n ** 40n).addMessage(300, inner).addBytes(4, Uint8Array.of(1, 2)).write());
  assert.equal(message.integer(3), 2 ** 40);
  assert.equal(message.message(300).text(1), "größe");
  assert.equal(BigInt.asIntN(64, message.message(300).integers(2)[0]), -1n);
  assert.deepEqual(Message.read(message.write()).bytes(4), [Uint8Array.of(1, 2)]);
  assert.throws(() => Message.read(Uint8Array.of(0x0a, 5, 1)), /ends within a field/);
  for (const tensor of [scalar("int64", 7), scalar("float32", 0.5), { ...emptyTensor("bool", [3]) }]) {
    assert.deepEqual(readTensor(Message.read(tensorMessage("t", tensor).write())), tensor);
  }
});

test("totals add up exactly", () => {
  assert.equal(roundedOnce([1e100, 1, -1e100, 1e-3]), 1.001);
  assert.equal(roundedOnce(Array(10).fill(0.1)), 1);
  assert.deepEqual(totalOf("total:auc:positives"), { name: "auc", part: "positives" });
  const totals = (sum, count) => new Map([["sum:loss", scalar("float64", sum)], ["count:loss", scalar("int64", count)]]);
  assert.deepEqual(combined(exactSum([totals(1, 2), totals(5, 1)]), {}), { loss: 2 });
  assert.throws(() => combined(totals(0, 0), {}), InputError);
  assert.throws(() => combined(new Map([["total:auc:x", scalar("int64", 0)]]), {}), /does not combine its totals/);
});

test("weights of a large model lie beside it, and each model there is has its own", async () => {
  const program = await loadProgram(`${folderOf("convolutional")}/program`);
  const session = await Session.open(program);
  const check = "import sys, onnx, numpy as np, pathlib; d=pathlib.Path(sys.argv[1]); onnx.checker.check_model(d/'m.onnx'); m=onnx.load(d/'m.onnx'); print(sum(float(np.abs(onnx.numpy_helper.to_array(t)).sum()) for t in m.graph.initializer))";
  const folder = temporaryFolder();
  const path = join(folder, "m.onnx");
  const sum = () => Number(python("-c", check, folder));
  const { model, data } = await session.exportModel({ dataName: "weights.data", oneFileLimit: 1000 });
  assert.equal(data.name, "weights.data");
  const large = { exportModel: (options) => session.exportModel({ ...options, oneFileLimit: 1000 }) };
  const others = ["m.onnx-0123.data", "n.onnx-0123456789abcdef.data"];
  for (const other of others) writeFileSync(join(folder, other), "");
  await saveModel(session, path);
  const whole = sum();
  await saveModel(large, path);
  const earlier = readdirSync(folder).sort();
  assert.deepEqual(earlier.map((name) => name.replace(/^m.onnx-[0-9a-f]{16}/, "m.onnx-HASH")).sort(), ["m.onnx", others[0], "m.onnx-HASH.data", others[1]]);
  assert.equal(sum(), whole);

  const state = await session.state();
  for (const { data: values } of state.values()) if (values instanceof Float32Array) values.forEach((value, place) => (values[place] = 2 * value));
  await session.loadState(state);
  // The new weights are there, and the new model does not come: the earlier one has its own.
  const broken = { exportModel: async (options) => ({ ...(await large.exportModel(options)), model: undefined }) };
  await assert.rejects(() => saveModel(broken, path), /m\.onnx' could not be written/);
  assert.equal(readdirSync(folder).length, earlier.length + 1);
  assert.equal(sum(), whole);
  await saveModel(large, path);
  assert.equal(readdirSync(folder).length, earlier.length);
  assert.notEqual(sum(), whole);
  await saveModel(session, path);
  assert.deepEqual(readdirSync(folder).sort(), ["m.onnx", ...others]);
});
