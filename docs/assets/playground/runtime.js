// onnxruntime-web, from this site's own files, and the models that it has read so far.

const VENDOR = new URL("../vendor/onnxruntime-web/dist/", import.meta.url);
const sessions = new Map();
let runtime = null;

/** Load onnxruntime-web and its WebAssembly; gives its release. */
export async function load() {
  if (typeof WebAssembly !== "object") throw new Error("this browser has no WebAssembly");
  const ort = await import(new URL("ort.wasm.min.mjs", VENDOR));
  ort.env.wasm.wasmPaths = VENDOR.href;
  ort.env.wasm.numThreads = 1; // more of them need headers that a static host may not send
  runtime = ort;
  await session("none-softcap0-heads1");
  return ort.env.versions.web;
}

/** The output and the weights that a model computes, and in how many milliseconds. */
export async function run(name, { query, key, value }, { heads, length, scale }) {
  const model = await session(name);
  const shape = [heads, length, query.length / heads / length];
  const tensor = (data, sizes) => new runtime.Tensor("float32", data, sizes);
  const feeds = {
    query: tensor(query, shape),
    key: tensor(key, shape),
    value: tensor(value, shape),
    scale: tensor(Float32Array.of(scale), []),
  };
  const start = performance.now();
  const { output, weights } = await model.run(feeds);
  return { output: output.data, weights: weights.data, milliseconds: performance.now() - start };
}

async function session(name) {
  if (!sessions.has(name)) {
    const options = { executionProviders: ["wasm"] };
    const url = new URL(`${name}.onnx`, import.meta.url);
    sessions.set(name, await runtime.InferenceSession.create(url.href, options));
  }
  return sessions.get(name);
}
