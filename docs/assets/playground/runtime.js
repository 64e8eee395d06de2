// onnxruntime-web, from this site's own files, and the models that it has read so far.

import { file } from "./files.js";

const VENDOR = new URL("../vendor/onnxruntime-web/dist/", import.meta.url);
/** Where a graph may be computed, and what of onnxruntime-web does it. */
export const PLACES = {
  wasm: { name: "WebAssembly", module: "ort.wasm.min.mjs", megabytes: 14 },
  webgpu: { name: "WebGPU", module: "ort.webgpu.min.mjs", megabytes: 27 },
};
/** By place, what is loaded: the module, its release, its provider, and why that is not the one asked for. */
export const runtimes = new Map();
const sessions = new Map();
const LOGGED = 3; // errors: that WebGPU leaves some nodes to the CPU is a warning

/** Load onnxruntime-web and its WebAssembly. A place that refuses a first graph is left for WebAssembly. */
export async function load(place) {
  if (typeof WebAssembly !== "object") throw new Error("this browser has no WebAssembly");
  const ort = await import(new URL(PLACES[place].module, VENDOR));
  ort.env.wasm.wasmPaths = VENDOR.href;
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

/** The output and the weights that a model computes, and in how many milliseconds. */
export async function run(place, name, feeds, weights) {
  const runtime = runtimes.get(place);
  const model = await session(place, runtime, name, weights);
  const tensors = Object.entries(feeds).map(([input, [data, shape]]) => [
    input,
    new runtime.ort.Tensor("float32", data, shape),
  ]);
  const start = performance.now();
  const { output, weights: shares } = await model.run(Object.fromEntries(tensors));
  return { output: output.data, weights: shares.data, milliseconds: performance.now() - start };
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
