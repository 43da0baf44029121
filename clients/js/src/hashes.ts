/** SHA-256 of files and arrays. */

/** A SHA-256 that takes its bytes in parts. */
export interface Hash {
  update(part: Uint8Array): unknown;
  /** The hash of all parts in hexadecimal digits. */
  digest(): string;
}

let makeHash = (): Hash => new Sha256();

/** Let another implementation compute SHA-256 where the result is needed at once. */
export function useHash(make: () => Hash): void {
  makeHash = make;
}

/** SHA-256 of the bytes of several parts, in hexadecimal digits. */
export function sha256Now(...parts: Uint8Array[]): string {
  const hash = makeHash();
  for (const part of parts) hash.update(part);
  return hash.digest();
}

/** SHA-256 of bytes, in hexadecimal digits; large ones are hashed while other work goes on, where the platform can. */
export async function sha256(bytes: Uint8Array): Promise<string> {
  const subtle = globalThis.crypto?.subtle;
  // A page that was not loaded over a secure connection has no digests of its own.
  return subtle ? hexadecimal(new Uint8Array(await subtle.digest("SHA-256", bytes as BufferSource))) : sha256Now(bytes);
}

function hexadecimal(bytes: Uint8Array): string {
  return [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
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

const BLOCK = 64;

/** SHA-256 as FIPS 180-4 has it. */
export class Sha256 implements Hash {
  private readonly state = Uint32Array.from(INITIAL);
  private readonly words = new Uint32Array(64);
  private readonly rest = new Uint8Array(BLOCK);
  private length = 0;

  update(part: Uint8Array): this {
    let place = 0;
    const kept = this.length % BLOCK;
    this.length += part.length;
    if (kept) {
      place = Math.min(BLOCK - kept, part.length);
      this.rest.set(part.subarray(0, place), kept);
      if (kept + place < BLOCK) return this;
      this.blocks(this.rest);
    }
    const whole = part.length - ((part.length - place) % BLOCK);
    this.blocks(part.subarray(place, whole));
    this.rest.set(part.subarray(whole));
    return this;
  }

  digest(): string {
    const length = this.length;
    const padding = new Uint8Array((length % BLOCK < 56 ? 64 : 128) - (length % BLOCK));
    padding[0] = 0x80;
    new DataView(padding.buffer).setBigUint64(padding.length - 8, BigInt(length) * 8n);
    this.update(padding);
    const bytes = new DataView(new ArrayBuffer(32));
    this.state.forEach((word, i) => bytes.setUint32(4 * i, word));
    return hexadecimal(new Uint8Array(bytes.buffer));
  }

  private blocks(bytes: Uint8Array): void {
    const { words } = this;
    const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    for (let offset = 0; offset < bytes.length; offset += BLOCK) {
      for (let i = 0; i < 16; i++) words[i] = view.getUint32(offset + 4 * i);
      for (let i = 16; i < 64; i++) {
        const near = words[i - 15]!;
        const far = words[i - 2]!;
        words[i] =
          words[i - 16]! + words[i - 7]! +
          (rotated(near, 7) ^ rotated(near, 18) ^ (near >>> 3)) +
          (rotated(far, 17) ^ rotated(far, 19) ^ (far >>> 10));
      }
      compress(this.state, words);
    }
  }
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
