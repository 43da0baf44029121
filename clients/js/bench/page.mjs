// What the benchmark runs in a browser.
export { timeTensorFlow } from "./tensorflow.mjs";
export { timeSession } from "./session.mjs";
