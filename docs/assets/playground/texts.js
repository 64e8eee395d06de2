// The texts: sentences with what enters a layer of a real encoder, a reader's own sentence through the encoder, and
// own words as random vectors.

import { ENCODER, projected, tokens as tokenized, vectors as encoded } from "./encoder.js";
import { file } from "./files.js";
import { vectors, WIDTH } from "./vectors.js";

export const OWN = "own";
export const TYPED = "typed";
const MOST_TOKENS = 64;

/** The maps of the first sentence, which the page has within: opening it reads no file. */
export function opening(form) {
  const bytes = Uint8Array.from(atob(form.elements.text.selectedOptions[0].dataset.weights), (c) => c.charCodeAt(0));
  const shares = new DataView(bytes.buffer);
  const weights = Float64Array.from({ length: bytes.length / 2 }, (_, place) => shares.getUint16(2 * place, true));
  return { ...described(form), weights: weights.map((share) => share / (2 ** 16 - 1)) };
}

/** What is computed of the text: the graph and its feeds, and query, key and value for the formula. */
export async function prepared(form, chosen) {
  const prepare = { [OWN]: own, [TYPED]: typed }[chosen.text] ?? sentence;
  const facts = await prepare(form, chosen);
  facts.feeds.scale = [Float32Array.of(facts.scale), []];
  return facts;
}

function own(form, { mask, softcap, temperature }) {
  const words = form.elements.tokens.value.trim().split(/\s+/).filter(Boolean);
  const tokens = words.slice(0, MOST_TOKENS);
  const heads = Number(form.elements.heads.value);
  const inputs = vectors(tokens, heads);
  const shape = [heads, tokens.length, WIDTH / heads];
  return {
    model: `${mask}-softcap${softcap}-heads${heads}`,
    tokens,
    length: tokens.length,
    left: words.length - tokens.length,
    heads,
    scale: scale(temperature, WIDTH / heads),
    inputs,
    feeds: Object.fromEntries(Object.entries(inputs).map(([name, data]) => [name, [data, shape]])),
  };
}

/** A reader's own sentence, as far as it fits. */
async function typed(form, chosen) {
  const { tokens, all } = tokenized(form.elements.sentence.value, MOST_TOKENS);
  const x = await encoded(chosen.place, tokens);
  const facts = { tokens, length: tokens.length, left: all - tokens.length, inputs: await projected(x) };
  return { ...facts, ...layer(chosen, x) };
}

/** A sentence of the page, whose vectors are in a file. */
async function sentence(form, chosen) {
  const facts = described(form);
  const { tokens, heads } = facts;
  const { width, channels } = ENCODER;
  const buffer = await file(`sentence-${chosen.text}.bin`);
  const size = heads * tokens.length * width;
  const start = tokens.length * channels * Float32Array.BYTES_PER_ELEMENT;
  const part = (place) => new Float64Array(buffer, start + place * size * Float64Array.BYTES_PER_ELEMENT, size);
  const inputs = { query: part(0), key: part(1), value: part(2) };
  return { ...facts, inputs, ...layer(chosen, new Float32Array(buffer, 0, tokens.length * channels)) };
}

/** The graph of the encoder's layer, for the vectors that enter it. */
function layer({ mask, softcap, temperature }, x) {
  const { heads, width, channels, weights } = ENCODER;
  return {
    model: `${mask}-softcap${softcap}-encoder`,
    weights,
    heads,
    scale: scale(temperature, width),
    feeds: { x: [x, [x.length / channels, channels]] },
  };
}

/** What the page says of the chosen sentence. */
function described(form) {
  const { tokens: words, row, note } = form.elements.text.selectedOptions[0].dataset;
  const tokens = JSON.parse(words);
  return { tokens, length: tokens.length, row: Number(row), note, heads: ENCODER.heads };
}

function scale(temperature, width) {
  return Math.fround(1 / (temperature * Math.sqrt(width)));
}
