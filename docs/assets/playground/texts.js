// The texts: sentences with what enters a layer of a real encoder, and a reader's own words as random vectors.

import { file } from "./files.js";
import { vectors, WIDTH } from "./vectors.js";

export const OWN = "own";
const MOST_TOKENS = 64;
const ENCODER = { heads: 12, width: 32, channels: 384 };

/** What is computed of the text: the graph and its feeds, and query, key and value for the formula. */
export async function prepared(form, chosen) {
  const facts = chosen.text === OWN ? own(form, chosen) : await sentence(form, chosen);
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

async function sentence(form, { text, mask, softcap, temperature }) {
  const { tokens: words, row, note } = form.elements.text.selectedOptions[0].dataset;
  const tokens = JSON.parse(words);
  const { heads, width, channels } = ENCODER;
  const buffer = await file(`sentence-${text}.bin`);
  const size = heads * tokens.length * width;
  const start = tokens.length * channels * Float32Array.BYTES_PER_ELEMENT;
  const part = (place) => new Float64Array(buffer, start + place * size * Float64Array.BYTES_PER_ELEMENT, size);
  return {
    model: `${mask}-softcap${softcap}-encoder`,
    weights: "encoder.bin",
    tokens,
    length: tokens.length,
    row: Number(row),
    note,
    heads,
    scale: scale(temperature, width),
    inputs: { query: part(0), key: part(1), value: part(2) },
    feeds: { x: [new Float32Array(buffer, 0, tokens.length * channels), [tokens.length, channels]] },
  };
}

function scale(temperature, width) {
  return Math.fround(1 / (temperature * Math.sqrt(width)));
}
