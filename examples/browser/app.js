// The page: a session in a worker trains, while this draws what comes of it.
import { FeatureCache, WorkerSession, downloadModel } from "./burnish/burnish-runtime.js";

import { LossChart } from "./chart.js";
import { imageOf, inputOf, loadDigits } from "./digits.js";

const BATCH = 32;
/** Own drawings in each batch, where there are any. */
const OWN = 6;
/** Steps between two looks at the test images. */
const CHECKED_EVERY = 20;
const CHECKPOINT = "digits";

const element = (id) => document.getElementById(id);
const chart = new LossChart(element("curve"));
const own = { images: [], labels: [] };
let session, cache, digits, tested, isTraining, order, place;

function say(text, isError = false) {
  element("status").textContent = text;
  element("status").className = isError ? "error" : "";
}

/** Do something that may fail, and say why where it does. */
async function attempt(work) {
  try {
    await work();
  } catch (error) {
    stop();
    say(error.message, true);
  }
}

async function open() {
  const worker = new Worker("burnish/worker.js", { type: "module" });
  session = await WorkerSession.open(worker, "program", { wasmPaths: new URL("burnish/wasm/", location).href });
  cache ??= new FeatureCache({ features: (batch) => session.features(batch) }); // what is frozen is the same in each session
}

async function start() {
  const before = performance.now();
  [digits] = await Promise.all([loadDigits(), open()]);
  element("backend").textContent =
    `ONNX Runtime, ${session.backend === "wasm" ? "WebAssembly" : "WebGPU"}; ${digits.train.length} images to train on, ${digits.test.length} to test with.`;
  for (const id of ["train", "reset", "save", "restore", "export"]) element(id).disabled = false;
  await check();
  say(`Ready after ${((performance.now() - before) / 1000).toFixed(1)} s`);
}

/** The image of a sample: those that came with the page are counted first, then own drawings. */
const imageOfSample = (sample) => (sample < digits.train.length ? digits.train.image(sample) : own.images[sample - digits.train.length]);

/** The next images in a random order, with own drawings among them: their features, and what they are. */
async function nextBatch() {
  if (!order || place + BATCH > order.length) {
    order = Array.from({ length: digits.train.length }, (_, index) => index);
    for (let index = order.length - 1; index > 0; index--) {
      const other = Math.floor(Math.random() * (index + 1));
      [order[index], order[other]] = [order[other], order[index]];
    }
    place = 0;
  }
  const samples = order.slice(place, place + BATCH);
  place += BATCH;
  for (let row = 0; row < Math.min(OWN, own.labels.length * 2); row++) {
    samples[row] = digits.train.length + Math.floor(Math.random() * own.labels.length);
  }
  const features = await cache.features(samples, (missing) => inputOf(missing.map(imageOfSample)));
  const labels = samples.map((sample) => digits.train.labels[sample] ?? own.labels[sample - digits.train.length]);
  return { ...features, labels };
}

async function train() {
  isTraining = true;
  element("train").textContent = "Pause";
  say("Training…");
  let time = 0;
  while (isTraining) {
    const before = performance.now();
    const { loss } = await session.step(await nextBatch());
    const taken = performance.now() - before;
    time = time ? time + 0.1 * (taken - time) : taken;
    chart.add(loss);
    element("loss").textContent = loss.toFixed(3);
    element("time").textContent = `${time.toFixed(time < 10 ? 1 : 0)} ms`;
    element("steps").textContent = session.stepCount;
    element("cached").textContent = `${cache.size} images have been through the frozen layers, each once.`;
    if (session.stepCount % CHECKED_EVERY === 0) await Promise.all([check(), guess()]);
    await new Promise(requestAnimationFrame);
  }
  await check();
}

function stop() {
  if (!isTraining) return;
  isTraining = false;
  element("train").textContent = "Train";
  say("Paused");
}

async function check() {
  const { test } = digits;
  tested ??= await session.features(inputOf(test.labels.map((_, sample) => test.image(sample))));
  const { accuracy } = await session.evaluate({ ...tested, labels: test.labels });
  element("accuracy").textContent = `${(100 * accuracy).toFixed(1)} %`;
}

async function restart() {
  stop();
  await session.close();
  await open();
  chart.clear();
  for (const [id, text] of Object.entries({ steps: "0", loss: "–", time: "–" })) element(id).textContent = text;
  await Promise.all([check(), guess()]);
  say("Started over");
}

async function save() {
  await session.saveCheckpoint(CHECKPOINT, { losses: chart.losses });
  say(`Saved in this browser at step ${session.stepCount}`);
}

async function restore() {
  stop();
  const { losses } = await session.restore(CHECKPOINT);
  chart.clear();
  losses.forEach((loss) => chart.add(loss));
  element("steps").textContent = session.stepCount;
  await Promise.all([check(), guess()]);
  say(`Restored step ${session.stepCount}`);
}

/** Show how likely each digit is for what is drawn. */
async function guess() {
  const image = imageOf(element("pad"));
  const rows = [...element("bars").children];
  let shares = rows.map(() => 0);
  if (image && session) {
    const { logits } = await session.predict(inputOf([image]));
    const powers = [...logits.data].map((value) => Math.exp(value - Math.max(...logits.data)));
    const total = powers.reduce((sum, power) => sum + power);
    shares = powers.map((power) => power / total);
  }
  const most = image ? shares.indexOf(Math.max(...shares)) : -1;
  rows.forEach((row, digit) => {
    row.className = digit === most ? "most" : "";
    row.lastElementChild.style.width = `${100 * shares[digit]}%`;
  });
}

function teach(label) {
  const image = imageOf(element("pad"));
  if (!image) return say("Draw a digit first");
  own.images.push(image);
  own.labels.push(label);
  const { length } = own.labels;
  element("own").textContent = `${length} of your drawings ${length === 1 ? "is" : "are"} among the training images.`;
  clear();
}

function clear() {
  const pad = element("pad");
  pad.getContext("2d").clearRect(0, 0, pad.width, pad.height);
  return guess();
}

function makePad() {
  const pad = element("pad");
  const context = pad.getContext("2d", { willReadFrequently: true });
  const at = ({ offsetX, offsetY }) => [(offsetX * pad.width) / pad.clientWidth, (offsetY * pad.height) / pad.clientHeight];
  let last;
  const stroke = (event) => {
    if (!last) return;
    const point = at(event);
    Object.assign(context, { lineWidth: 36, lineCap: "round", lineJoin: "round", strokeStyle: getComputedStyle(pad).color });
    context.beginPath();
    context.moveTo(...last);
    context.lineTo(...point);
    context.stroke();
    last = point;
  };
  pad.addEventListener("pointerdown", (event) => {
    pad.setPointerCapture(event.pointerId);
    last = at(event);
    stroke(event);
  });
  pad.addEventListener("pointermove", stroke);
  for (const end of ["pointerup", "pointercancel"]) {
    pad.addEventListener(end, () => {
      last = undefined;
      attempt(guess);
    });
  }
}

for (let digit = 0; digit < 10; digit++) {
  const row = element("bars").appendChild(document.createElement("li"));
  row.append(document.createElement("span"), document.createElement("i"));
  row.firstElementChild.textContent = digit;
  const button = element("digits").appendChild(document.createElement("button"));
  button.textContent = digit;
  button.addEventListener("click", () => teach(digit));
}
makePad();
element("train").addEventListener("click", () => (isTraining ? stop() : attempt(train)));
element("reset").addEventListener("click", () => attempt(restart));
element("save").addEventListener("click", () => attempt(save));
element("restore").addEventListener("click", () => attempt(restore));
element("export").addEventListener("click", () => attempt(() => downloadModel(session, "digits.onnx")));
element("clear").addEventListener("click", () => attempt(clear));
attempt(start);
