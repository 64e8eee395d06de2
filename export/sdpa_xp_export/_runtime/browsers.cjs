// Runs models in onnxruntime-web on WebAssembly for browsers.py. Its messages are those of frames.py.

"use strict";
const fs = require("node:fs");
const { Worker, isMainThread } = require("node:worker_threads");

const TYPES = {
  bool: Uint8Array,
  int8: Int8Array,
  int16: Int16Array,
  int32: Int32Array,
  int64: BigInt64Array,
  uint8: Uint8Array,
  uint16: Uint16Array,
  uint32: Uint32Array,
  uint64: BigUint64Array,
  float16: Uint16Array, // its bits: not every node has a Float16Array
  float32: Float32Array,
  float64: Float64Array,
};
const write = fs.writeSync;
let ort, session;
let printed = ""; // onnxruntime-web prints warnings, and a profile

const doing = {
  async start() {
    // The folder where the user runs Python, those above it, and NODE_PATH.
    ort = require(require.resolve("onnxruntime-web", { paths: [process.cwd()] }));
    ort.env.wasm.numThreads = 1;
    return { facts: { version: ort.env.versions.web } };
  },
  async load({ file, profile }, { model }) {
    await session?.release();
    session = await ort.InferenceSession.create(file === null ? model.data : fs.readFileSync(file), {
      executionProviders: ["wasm"],
      enableProfiling: profile,
      logSeverityLevel: 4,
    });
    return { facts: { inputs: session.inputNames, outputs: session.outputNames } };
  },
  async run(_, arrays) {
    const feeds = {};
    for (const [name, { dtype, data, shape }] of Object.entries(arrays)) feeds[name] = new ort.Tensor(dtype, data, shape);
    return { facts: {}, arrays: await session.run(feeds) };
  },
  async profile() {
    printed = "";
    session.endProfiling();
    return { facts: { profile: printed } };
  },
};

async function answer({ facts, arrays }) {
  const named = {};
  for (const [name, dtype, shape, bytes] of arrays) {
    if (!(dtype in TYPES)) throw new Error(`onnxruntime's JavaScript API has no tensor of ${dtype}`);
    named[name] = { dtype, shape, data: new TYPES[dtype](bytes) };
  }
  return doing[facts.do](facts, named);
}

/** Node.js may make its pipes non-blocking; then what they cannot do at once is an error. */
function patiently(act) {
  while (true) {
    try {
      return act();
    } catch (error) {
      if (error.code !== "EAGAIN") throw error;
      Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 1); // a millisecond
    }
  }
}

function send({ facts, arrays = {} }) {
  const stated = Object.entries(arrays).map(([name, { type, dims }]) => [name, type, dims]);
  const text = Buffer.from(JSON.stringify({ facts, arrays: stated }));
  const length = Buffer.alloc(8);
  length.writeBigUInt64LE(BigInt(text.length));
  for (const part of [length, text, ...Object.values(arrays).map(({ data }) => data)]) {
    const bytes = Buffer.from(part.buffer, part.byteOffset, part.byteLength);
    for (let written = 0; written < bytes.length; ) written += patiently(() => write(1, bytes, written));
  }
}

function read(count) {
  const bytes = new Uint8Array(count); // no Buffer: its pool would not be aligned for other types
  for (let got = 0; got < count; ) {
    const more = patiently(() => fs.readSync(0, bytes, got, count - got, null));
    if (!more) process.exit();
    got += more;
  }
  return bytes;
}

function receive() {
  const length = Number(new DataView(read(8).buffer).getBigUint64(0, true));
  const { facts, arrays } = JSON.parse(new TextDecoder().decode(read(length)));
  for (const stated of arrays) {
    const [, dtype, shape] = stated;
    stated.push(read(shape.reduce((a, b) => a * b, TYPES[dtype]?.BYTES_PER_ELEMENT ?? 2)).buffer);
  }
  return { facts, arrays };
}

async function main() {
  // Emscripten prints by `writeSync` in Node.js, and by the console elsewhere. The answers are in the same stream.
  fs.writeSync = (_, text) => ((printed += text), text.length);
  for (const level of ["log", "info", "warn", "error"]) console[level] = (...words) => (printed += `${words.join(" ")}\n`);
  while (true) send(await answer(receive()).catch((error) => ({ facts: { error: reason(error) } })));
}

function reason(error) {
  const text = String(error?.message ?? error);
  return text.includes("unsupported data type: 16") ? "onnxruntime's JavaScript API has no tensor of bfloat16" : text;
}

/** End the process with the one that started it, also if a model hangs. */
function watch() {
  const parent = process.ppid;
  setInterval(() => {
    try {
      process.kill(parent, 0);
      if (process.ppid === parent) return;
    } catch {}
    process.kill(process.pid, "SIGKILL");
  }, 500);
}

if (isMainThread) {
  new Worker(__filename);
  main();
} else {
  watch();
}
