// onnxruntime-web, from this site's own files, and the models that it has read so far.

import { bytes, file } from "./files.js";

const VENDOR = new URL("../vendor/onnxruntime-web/dist/", import.meta.url);
/** Where a graph may be computed, and what of onnxruntime-web does it. */
export const PLACES = {
  wasm: { name: "WebAssembly", module: "ort.wasm.min.mjs", binary: "ort-wasm-simd-threaded.wasm", megabytes: 14 },
  webgpu: { name: "WebGPU", module: "ort.webgpu.min.mjs", binary: "ort-wasm-simd-threaded.asyncify.wasm", megabytes: 27 },
};
/** By place, what is loaded: the module, its release, its provider, and why that is not the one asked for. */
export const runtimes = new Map();
const sessions = new Map();
const LOGGED = 3; // errors: that WebGPU leaves some nodes to the CPU is a warning

/** Load onnxruntime-web and its WebAssembly. A place that refuses a first graph is left for WebAssembly. */
export async function load(place, count) {
  if (typeof WebAssembly !== "object") throw new Error("this browser has no WebAssembly");
  const { module, binary } = PLACES[place];
  const ort = await import(new URL(module, VENDOR));
  ort.env.wasm.wasmPaths = VENDOR.href;
  ort.env.wasm.wasmBinary = await bytes(new URL(binary, VENDOR), count);
  ort.env.wasm.numThreads = 1; // more of them need headers that a static host may not send
  const runtime = { ort, release: ort.env.versions.web, provider: place };
  try {
    await session(place, runtime, "none-softcap0-heads1");
  } catch (error) {
    if (place === "wasm") throw error;
    Object.assign(runtime, { provider: "wasm", refused: error.message });
    await session(place, runtime, "none-softcap0-heads1");
  }
  runtimes.set(place, runtime);
}

/** What a model computes, by the names of its outputs, and in how many milliseconds. */
export async function run(place, name, feeds, weights) {
  const runtime = runtimes.get(place);
  const model = await session(place, runtime, name, weights);
  const tensors = Object.entries(feeds).map(([input, [data, shape, type = "float32"]]) => [
    input,
    new runtime.ort.Tensor(type, data, shape),
  ]);
  const start = performance.now();
  const outputs = Object.entries(await model.run(Object.fromEntries(tensors)));
  const milliseconds = performance.now() - start;
  return { ...Object.fromEntries(outputs.map(([output, { data }]) => [output, data])), milliseconds };
}

/** The session of a model, whose weights may be in a file of their own. */
async function session(place, { ort, provider }, name, weights) {
  const key = `${place} ${provider} ${name}`;
  if (!sessions.has(key)) {
    const options = { executionProviders: [provider], logSeverityLevel: LOGGED };
    if (weights) options.externalData = [{ path: weights, data: new Uint8Array(await file(weights)) }];
    const model = new Uint8Array(await file(`${name}.onnx`));
    sessions.set(key, await ort.InferenceSession.create(model, options));
  }
  return sessions.get(key);
}
