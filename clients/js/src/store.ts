/** Where checkpoints are kept by name: files in Node, IndexedDB in a browser. */

export interface Store {
  /** Write bytes under a name, whole or not at all. */
  write(name: string, bytes: Uint8Array): Promise<void>;
  read(name: string): Promise<Uint8Array | undefined>;
}

let chosen: Store | undefined;

export function useStore(store: Store): void {
  chosen = store;
}

export function store(): Store {
  return chosen!;
}
