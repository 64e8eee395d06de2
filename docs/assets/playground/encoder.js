// The encoder for a reader's own sentence: its tokens, the vectors that enter the layer, and query, key and value.

import { file } from "./files.js";
import { run } from "./runtime.js";
import { tokenizer } from "./wordpiece.js";

export const ENCODER = { heads: 12, width: 32, channels: 384, weights: "encoder.bin" };
export const MEGABYTES = 25; // the three files below
const START = { model: "encoder-start", weights: "encoder-start.bin" };
const VOCABULARY = "vocabulary.txt";
const ROLES = ["query", "key", "value"];
const { heads, width, channels } = ENCODER;
let tokenize; // and the number of each token, once the encoder is loaded
let ids;

/** Whether a sentence can be computed. */
export function ready() {
  return tokenize !== undefined;
}

/** Load the weights and the vocabulary. */
export async function load(count) {
  const names = [START.weights, ENCODER.weights, VOCABULARY];
  const [, , list] = await Promise.all(names.map((name) => file(name, count)));
  const vocabulary = new TextDecoder().decode(list).split("\n");
  ids = new Map(vocabulary.map((token, id) => [token, id]));
  tokenize = tokenizer(vocabulary);
}

/** The tokens of a sentence, at most so many: the last one stays [SEP]. */
export function tokens(sentence, most) {
  const all = tokenize(sentence);
  return { tokens: all.length > most ? [...all.slice(0, most - 1), all.at(-1)] : all, all: all.length };
}

/** The vectors that enter the layer, (tokens, channels), as the graph computes them. */
export async function vectors(place, tokens) {
  const numbers = BigInt64Array.from(tokens, (token) => BigInt(ids.get(token)));
  const { output } = await run(place, START.model, { ids: [numbers, [tokens.length], "int64"] }, START.weights);
  return output;
}

/** Query, key and value of all heads, (heads, tokens, width) each, in float64. */
export async function projected(x) {
  const weights = new Float32Array(await file(ENCODER.weights));
  const size = channels * channels + channels;
  return Object.fromEntries(
    ROLES.map((role, place) => [role, projection(x, weights.subarray(place * size, (place + 1) * size))]),
  );
}

/** x W + b; the file has W, (channels, channels), before b. */
function projection(x, weights) {
  const length = x.length / channels;
  const found = new Float64Array(x.length);
  const row = new Float64Array(channels);
  for (let i = 0; i < length; i++) {
    row.set(weights.subarray(channels * channels));
    for (let from = 0; from < channels; from++) {
      const factor = x[i * channels + from];
      for (let to = 0; to < channels; to++) row[to] += factor * weights[from * channels + to];
    }
    for (let head = 0; head < heads; head++)
      found.set(row.subarray(head * width, (head + 1) * width), (head * length + i) * width);
  }
  return found;
}
