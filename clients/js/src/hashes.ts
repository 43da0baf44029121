/** Digests of files and arrays. */

/** SHA-256 of bytes, in hexadecimal digits. */
export async function sha256(bytes: Uint8Array): Promise<string> {
  const subtle = globalThis.crypto?.subtle;
  // A page that was not loaded over a secure connection has no digests of its own.
  const digest = subtle ? new Uint8Array(await subtle.digest("SHA-256", bytes as BufferSource)) : sha256WithoutCrypto(bytes);
  return [...digest].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

const PRIMES = firstPrimes(64);
const ROUND_CONSTANTS = Uint32Array.from(PRIMES, (prime) => fractionBits(Math.cbrt(prime)));
const INITIAL = PRIMES.slice(0, 8).map((prime) => fractionBits(Math.sqrt(prime)));

function firstPrimes(count: number): number[] {
  const primes: number[] = [];
  for (let n = 2; primes.length < count; n++) if (primes.every((prime) => n % prime)) primes.push(n);
  return primes;
}

function fractionBits(value: number): number {
  return Math.floor((value - Math.floor(value)) * 2 ** 32);
}

/** SHA-256 as FIPS 180-4 has it. */
export function sha256WithoutCrypto(bytes: Uint8Array): Uint8Array {
  const padded = new Uint8Array(Math.ceil((bytes.length + 9) / 64) * 64);
  padded.set(bytes);
  padded[bytes.length] = 0x80;
  const view = new DataView(padded.buffer);
  view.setBigUint64(padded.length - 8, BigInt(bytes.length) * 8n);
  const state = Uint32Array.from(INITIAL);
  const words = new Uint32Array(64);
  for (let offset = 0; offset < padded.length; offset += 64) {
    for (let i = 0; i < 16; i++) words[i] = view.getUint32(offset + 4 * i);
    for (let i = 16; i < 64; i++) {
      const near = words[i - 15]!;
      const far = words[i - 2]!;
      words[i] =
        words[i - 16]! + words[i - 7]! +
        (rotated(near, 7) ^ rotated(near, 18) ^ (near >>> 3)) +
        (rotated(far, 17) ^ rotated(far, 19) ^ (far >>> 10));
    }
    compress(state, words);
  }
  const digest = new DataView(new ArrayBuffer(32));
  state.forEach((word, i) => digest.setUint32(4 * i, word));
  return new Uint8Array(digest.buffer);
}

function rotated(word: number, by: number): number {
  return (word >>> by) | (word << (32 - by));
}

function compress(state: Uint32Array, words: Uint32Array): void {
  let [a, b, c, d, e, f, g, h] = state as unknown as [number, number, number, number, number, number, number, number];
  for (let i = 0; i < 64; i++) {
    const one = (h + (rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25)) + ((e & f) ^ (~e & g)) + ROUND_CONSTANTS[i]! + words[i]!) | 0;
    const two = ((rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22)) + ((a & b) ^ (a & c) ^ (b & c))) | 0;
    [h, g, f, e, d, c, b, a] = [g, f, e, (d + one) | 0, c, b, a, (one + two) | 0];
  }
  [a, b, c, d, e, f, g, h].forEach((value, i) => (state[i] = state[i]! + value));
}

const CRC_TABLE = Uint32Array.from({ length: 256 }, (_, byte) => {
  let value = byte;
  for (let bit = 0; bit < 8; bit++) value = value & 1 ? 0xedb88320 ^ (value >>> 1) : value >>> 1;
  return value;
});

/** CRC-32 of several parts, as zlib counts it. */
export class Crc32 {
  private value = 0xffffffff;

  add(bytes: Uint8Array): void {
    let value = this.value;
    for (let i = 0; i < bytes.length; i++) value = CRC_TABLE[(value ^ bytes[i]!) & 255]! ^ (value >>> 8);
    this.value = value;
  }

  /** Eight hexadecimal digits. */
  text(): string {
    return ((this.value ^ 0xffffffff) >>> 0).toString(16).padStart(8, "0");
  }
}
