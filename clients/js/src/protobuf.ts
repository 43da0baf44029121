/** Protobuf messages as lists of fields: enough to read and rewrite ONNX files without their schema. */

const VARINT = 0;
const FIXED64 = 1;
const BYTES = 2;
const FIXED32 = 5;

type Field = { number: number } & (
  | { kind: typeof VARINT; value: bigint }
  | { kind: typeof FIXED64 | typeof BYTES | typeof FIXED32; value: Uint8Array }
  | { kind: "message"; value: Message }
);

const decoder = new TextDecoder();
const encoder = new TextEncoder();

/** One message. Fields keep their order; a nested message is read when it is asked for. */
export class Message {
  fields: Field[] = [];

  static read(bytes: Uint8Array): Message {
    const message = new Message();
    const reader = new Reader(bytes);
    while (!reader.isAtEnd) message.fields.push(reader.field());
    return message;
  }

  /** The messages of a repeated field, to be changed in place. */
  messages(number: number): Message[] {
    const found: Message[] = [];
    for (const [place, field] of this.fields.entries()) {
      if (field.number !== number) continue;
      if (field.kind === BYTES) {
        const value = Message.read(field.value);
        this.fields[place] = { number, kind: "message", value };
        found.push(value);
      } else if (field.kind === "message") {
        found.push(field.value);
      }
    }
    return found;
  }

  message(number: number): Message | undefined {
    return this.messages(number).at(-1);
  }

  /** The bytes of a repeated field, such as raw data. */
  bytes(number: number): Uint8Array[] {
    return this.fields.flatMap((field) => (field.number === number && field.kind === BYTES ? [field.value] : []));
  }

  texts(number: number): string[] {
    return this.bytes(number).map((value) => decoder.decode(value));
  }

  text(number: number): string {
    return this.texts(number).at(-1) ?? "";
  }

  /** Whole numbers of a repeated field, packed or not. */
  integers(number: number): bigint[] {
    return this.fields.flatMap((field) => {
      if (field.number !== number) return [];
      if (field.kind === VARINT) return [field.value];
      return field.kind === BYTES ? new Reader(field.value).varints() : [];
    });
  }

  integer(number: number): number {
    return Number(this.integers(number).at(-1) ?? 0n);
  }

  /** A number of 32 bits in floating point; undefined where the field is not there. */
  float(number: number): number | undefined {
    const field = this.fields.filter((item) => item.number === number).at(-1);
    if (field?.kind !== FIXED32) return undefined;
    return new DataView(field.value.buffer, field.value.byteOffset, 4).getFloat32(0, true);
  }

  /** Replace every text of a repeated field. */
  rename(number: number, rename: (text: string) => string): void {
    this.fields = this.fields.map((field) =>
      field.number === number && field.kind === BYTES
        ? { ...field, value: encoder.encode(rename(decoder.decode(field.value))) }
        : field,
    );
  }

  /** Remove all fields of these numbers; with `where` only those messages that it holds of. */
  remove(number: number, where?: (message: Message) => boolean): void {
    if (where) this.messages(number);
    this.fields = this.fields.filter(
      (field) => field.number !== number || (where !== undefined && !(field.kind === "message" && where(field.value))),
    );
  }

  addText(number: number, text: string): this {
    return this.addBytes(number, encoder.encode(text));
  }

  addBytes(number: number, value: Uint8Array): this {
    this.fields.push({ number, kind: BYTES, value });
    return this;
  }

  addInteger(number: number, value: number | bigint): this {
    this.fields.push({ number, kind: VARINT, value: BigInt(value) });
    return this;
  }

  addMessage(number: number, value: Message): this {
    this.fields.push({ number, kind: "message", value });
    return this;
  }

  write(): Uint8Array {
    const sizes = new Map<Message, number>();
    const target = { bytes: new Uint8Array(this.size(sizes)), place: 0 };
    this.writeInto(target, sizes);
    return target.bytes;
  }

  private size(sizes: Map<Message, number>): number {
    let total = 0;
    for (const field of this.fields) {
      total += varintSize(BigInt(field.number << 3));
      if (field.kind === VARINT) {
        total += varintSize(field.value);
      } else if (field.kind === "message") {
        const size = field.value.size(sizes);
        total += varintSize(BigInt(size)) + size;
      } else {
        total += (field.kind === BYTES ? varintSize(BigInt(field.value.length)) : 0) + field.value.length;
      }
    }
    sizes.set(this, total);
    return total;
  }

  private writeInto(target: Target, sizes: Map<Message, number>): void {
    for (const field of this.fields) {
      const kind = field.kind === "message" ? BYTES : field.kind;
      writeVarint(target, BigInt((field.number << 3) | kind));
      if (field.kind === VARINT) {
        writeVarint(target, field.value);
      } else if (field.kind === "message") {
        writeVarint(target, BigInt(sizes.get(field.value)!));
        field.value.writeInto(target, sizes);
      } else {
        if (field.kind === BYTES) writeVarint(target, BigInt(field.value.length));
        target.bytes.set(field.value, target.place);
        target.place += field.value.length;
      }
    }
  }
}

interface Target {
  bytes: Uint8Array;
  place: number;
}

class Reader {
  private place = 0;

  constructor(private readonly buffer: Uint8Array) {}

  get isAtEnd(): boolean {
    return this.place >= this.buffer.length;
  }

  varints(): bigint[] {
    const values: bigint[] = [];
    while (!this.isAtEnd) values.push(this.varint());
    return values;
  }

  field(): Field {
    const key = this.varint();
    const number = Number(key >> 3n);
    const kind = Number(key & 7n);
    if (number === 0) throw new Error("a field without a number");
    if (kind === VARINT) return { number, kind, value: this.varint() };
    if (kind === FIXED64) return { number, kind, value: this.take(8) };
    if (kind === FIXED32) return { number, kind, value: this.take(4) };
    if (kind === BYTES) return { number, kind, value: this.take(Number(this.varint())) };
    throw new Error(`a field of the unknown kind ${kind}`);
  }

  private varint(): bigint {
    let value = 0n;
    for (let shift = 0n; shift < 70n; shift += 7n) {
      const byte = this.buffer[this.place++];
      if (byte === undefined) throw new Error("it ends within a number");
      value |= BigInt(byte & 127) << shift;
      if (byte < 128) return value;
    }
    throw new Error("a number of more than 64 bits");
  }

  private take(length: number): Uint8Array {
    const end = this.place + length;
    if (end > this.buffer.length) throw new Error("it ends within a field");
    const value = this.buffer.subarray(this.place, end);
    this.place = end;
    return value;
  }
}

function varintSize(value: bigint): number {
  let size = 1;
  for (let rest = BigInt.asUintN(64, value) >> 7n; rest; rest >>= 7n) size++;
  return size;
}

function writeVarint(target: Target, value: bigint): void {
  let rest = BigInt.asUintN(64, value);
  while (rest > 127n) {
    target.bytes[target.place++] = Number(rest & 127n) | 128;
    rest >>= 7n;
  }
  target.bytes[target.place++] = Number(rest);
}
