/** The digest that every file of burnish has: the SHA-256 of its bytes, with zeros in place of the digest's own digits. */

import { CheckpointError } from "./errors.js";
import { sha256, sha256Now } from "./hashes.js";

/** The entry of a file that holds its digest. */
export const DIGEST = "burnish.digest";
/** What the entry holds while the digest is counted. */
export const BLANK = `sha256:${"0".repeat(64)}`;
/** The version of every file that this client reads and writes. */
export const FORMAT_VERSION = 3;

const WRITTEN = /^sha256:[0-9a-f]{64}$/;

/** Throw CheckpointError unless the bytes are those that the digest was counted of. */
export async function checkDigest(bytes: Uint8Array, digest: unknown, changed: () => CheckpointError): Promise<void> {
  const place = placeOf(bytes, digest);
  if (place < 0) throw changed();
  const blank = bytes.slice();
  blank.set(new TextEncoder().encode(BLANK), place);
  if (`sha256:${await sha256(blank)}` !== digest) throw changed();
}

/** The same, at once. */
export function checkDigestNow(bytes: Uint8Array, digest: unknown, changed: () => CheckpointError): void {
  const place = placeOf(bytes, digest);
  if (place < 0) throw changed();
  const own = sha256Now(bytes.subarray(0, place), new TextEncoder().encode(BLANK), bytes.subarray(place + BLANK.length));
  if (`sha256:${own}` !== digest) throw changed();
}

/** Write the digest of a file, in place, where its entry holds the blank. */
export async function putDigest(bytes: Uint8Array): Promise<void> {
  bytes.set(new TextEncoder().encode(`sha256:${await sha256(bytes)}`), placeOf(bytes, BLANK));
}

function placeOf(bytes: Uint8Array, digest: unknown): number {
  if (typeof digest !== "string" || !WRITTEN.test(digest)) return -1;
  const text = new TextEncoder().encode(digest);
  for (let place = bytes.indexOf(text[0]!); place >= 0; place = bytes.indexOf(text[0]!, place + 1)) {
    if (text.every((byte, i) => bytes[place + i] === byte)) return place;
  }
  return -1;
}

/**
 * Throw CheckpointError unless a file is of the version that this client reads.
 *
 * @param subject the file, as errors call it.
 * @param remedy how an older one is made again.
 */
export function checkVersion(found: unknown, subject: string, remedy: string): void {
  const version = Number(found);
  if (version === FORMAT_VERSION) return;
  const what = version > FORMAT_VERSION ? "update burnish-runtime" : remedy;
  throw new CheckpointError(`${subject} is of format version ${String(found)}, and this client reads version ${FORMAT_VERSION}: ${what}`);
}
