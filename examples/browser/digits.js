// Images of digits: those that come with the page, and what is drawn on it.

export const SIZE = 8;
const PIXELS = SIZE * SIZE;
const LARGEST = 16;
const FINE = 32;

/** Images as the input of the model. */
export function inputOf(images) {
  const data = new Float32Array(images.length * PIXELS);
  images.forEach((image, row) => data.set(image, row * PIXELS));
  return { x: { data, shape: [images.length, 1, SIZE, SIZE] } };
}

/** The images and labels of a split. */
export class Digits {
  constructor(images, labels) {
    this.images = images;
    this.labels = labels;
  }

  get length() {
    return this.labels.length;
  }

  /** The pixels of an image. */
  image(place) {
    return this.images.subarray(place * PIXELS, (place + 1) * PIXELS);
  }
}

/** Both splits, as `prepare.py` wrote them. */
export async function loadDigits() {
  const [sizes, bytes] = await Promise.all([
    fetch("digits.json").then((response) => response.json()),
    fetch("digits.bin").then((response) => response.arrayBuffer()),
  ]);
  const splits = {};
  let offset = 0;
  for (const [name, size] of Object.entries(sizes)) {
    const images = Float32Array.from(new Uint8Array(bytes, offset, size * PIXELS), (value) => value / LARGEST);
    const labels = [...new Uint8Array(bytes, offset + size * PIXELS, size)];
    splits[name] = new Digits(images, labels);
    offset += size * (PIXELS + 1);
  }
  return splits;
}

/**
 * What is drawn, in the form of the other images: 32 x 32 dots, of which each of 8 x 8 pixels counts those in its 4 x 4.
 *
 * The drawing is moved into the middle and scaled to the height that the others have. Undefined where nothing is drawn.
 */
export function imageOf(canvas) {
  const { width, height } = canvas;
  const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
  let [left, top, right, bottom] = [width, height, -1, -1];
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      if (data[4 * (y * width + x) + 3] < 128) continue;
      [left, right, top, bottom] = [Math.min(left, x), Math.max(right, x), Math.min(top, y), Math.max(bottom, y)];
    }
  }
  if (right < 0) return undefined;
  const [wide, high] = [right - left + 1, bottom - top + 1];
  const scale = Math.min(FINE / high, (FINE * 0.85) / wide);
  const fine = new OffscreenCanvas(FINE, FINE).getContext("2d");
  fine.imageSmoothingQuality = "high";
  fine.drawImage(canvas, left, top, wide, high, (FINE - wide * scale) / 2, (FINE - high * scale) / 2, wide * scale, high * scale);
  const dots = fine.getImageData(0, 0, FINE, FINE).data;
  const image = new Float32Array(PIXELS);
  const block = FINE / SIZE;
  for (let y = 0; y < FINE; y++) {
    for (let x = 0; x < FINE; x++) {
      if (dots[4 * (y * FINE + x) + 3] >= 128) image[Math.floor(y / block) * SIZE + Math.floor(x / block)] += 1 / LARGEST;
    }
  }
  return image;
}
