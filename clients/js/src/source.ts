/** Where the files of a program come from: a folder, an address, an archive, or bytes at hand. */

import { unzipSync } from "fflate";

import { CheckpointError, messageOf } from "./errors.js";

/** The files of one program. */
export interface Source {
  /** How errors call it. */
  name: string;
  /** The bytes of a file, or undefined where there is none. */
  read(file: string): Promise<Uint8Array | undefined>;
  /** The path of a file, where it has one: graphs with constants in a file of their own are opened by it. */
  path?(file: string): string;
}

const ZIP = [0x50, 0x4b, 0x03, 0x04];
/** Bytes up to which the files of an archive may unpack: an archive of zeros is small. */
const LARGEST_ARCHIVE = 2 ** 32;

export function isZip(bytes: Uint8Array): boolean {
  return ZIP.every((byte, place) => bytes[place] === byte);
}

/** Files by name, with the folder that they may lie in left out. */
export function sourceOfFiles(files: ReadonlyMap<string, Uint8Array>, name: string): Source {
  return { name, read: async (file) => files.get(file) };
}

/** The files of a zip archive, which may hold the program's folder or what is in it. */
export function sourceOfZip(bytes: Uint8Array, name: string): Source {
  let unpacked: Record<string, Uint8Array>;
  try {
    let total = 0;
    unpacked = unzipSync(bytes, {
      filter: ({ originalSize }) => {
        total += originalSize;
        if (total > LARGEST_ARCHIVE) throw new Error(`it unpacks to more than ${LARGEST_ARCHIVE} bytes`);
        return true;
      },
    });
  } catch (error) {
    throw new CheckpointError(`'${name}' is not a whole zip archive: ${messageOf(error)}. Pack the program again`, { cause: error });
  }
  const manifest = Object.keys(unpacked).find((path) => path === "program.json" || path.endsWith("/program.json"));
  const folder = manifest?.slice(0, -"program.json".length) ?? "";
  const files = Object.entries(unpacked).filter(([path]) => path.startsWith(folder));
  return sourceOfFiles(new Map(files.map(([path, content]) => [path.slice(folder.length), content])), name);
}

/** The files behind an address that ends in a folder. */
export function sourceOfUrl(url: string): Source {
  const folder = url.endsWith("/") ? url : `${url}/`;
  return { name: url, read: (file) => fetchBytes(folder + encodeURIComponent(file)) };
}

/** What lies at an address; undefined where the server has nothing there. */
export async function fetchBytes(url: string): Promise<Uint8Array | undefined> {
  let response: Response;
  try {
    response = await fetch(url);
  } catch (error) {
    throw new CheckpointError(`'${url}' cannot be fetched: ${messageOf(error)}. Check the address and the connection`, { cause: error });
  }
  if (response.status === 404) return undefined;
  if (!response.ok) {
    throw new CheckpointError(`'${url}' cannot be fetched: the server answers ${response.status} ${response.statusText}`);
  }
  return new Uint8Array(await response.arrayBuffer());
}
