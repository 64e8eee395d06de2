// The playground: settings and tokens in; the map, the graph's output and its error out.

import { attention, MASKS } from "./reference.js";
import { load, run } from "./runtime.js";
import { maps, numbers } from "./tables.js";
import { vectors, WIDTH } from "./vectors.js";

const MOST_TOKENS = 16;
const part = (name) => document.getElementById(`playground-${name}`);
const form = part("form");
let release = null; // of the runtime, once it is loaded
let latest = 0;
let running = Promise.resolve();

/** What the form says; `scale` is rounded to float32, which is what the graph is given. */
function settings() {
  const { mask, softcap, heads, temperature, tokens } = Object.fromEntries(new FormData(form));
  const words = tokens.trim().split(/\s+/).filter(Boolean).slice(0, MOST_TOKENS);
  const warmth = 2 ** temperature;
  return {
    model: `${mask}-softcap${softcap}-heads${heads}`,
    tokens: words,
    length: words.length,
    mask,
    softcap: Number(softcap),
    heads: Number(heads),
    temperature: warmth,
    scale: Math.fround(1 / (warmth * Math.sqrt(WIDTH / heads))),
  };
}

/** Compute what the form says, unless it says something else by then. */
function update() {
  const turn = ++latest;
  running = running.then(() => turn === latest && compute()).catch(failed);
}

async function compute() {
  const chosen = settings();
  part("temperature").textContent = chosen.temperature.toPrecision(2);
  form.elements.temperature.setAttribute("aria-valuetext", chosen.temperature.toPrecision(2));
  if (!chosen.length) return say("Write at least one word.");
  const inputs = vectors(chosen.tokens, chosen.heads);
  const reference = attention(inputs, chosen);
  const graph = release && (await run(chosen.model, inputs, chosen));
  const shown = graph || reference;
  part("maps").replaceChildren(...maps(chosen.tokens, chosen.heads, shown.weights, MASKS[chosen.mask]));
  part("output").replaceChildren(numbers(chosen.tokens, chosen.heads, shown.output));
  say(graph ? verdict(chosen, graph, reference) : "Computed in JavaScript, float64. No graph has run yet.");
  form.dispatchEvent(new CustomEvent("computed", { detail: { ...chosen, inputs, reference, graph } }));
}

function verdict(chosen, graph, reference) {
  const [output, weights] = ["output", "weights"].map((name) =>
    worst(graph[name], reference[name]).toExponential(1),
  );
  return (
    `${chosen.model}.onnx ran in onnxruntime-web ${release}, in ${graph.milliseconds.toFixed(1)} ms. ` +
    `Largest error against float64: output ${output}, weights ${weights}.`
  );
}

/** The largest difference; NaN if one is. */
function worst(found, expected) {
  return expected.reduce((most, number, place) => Math.max(most, Math.abs(found[place] - number)), 0);
}

function say(text) {
  part("status").textContent = text;
}

function failed(error) {
  say(`The graph did not run: ${error.message}.`);
}

form.addEventListener("input", update);
form.addEventListener("submit", (event) => event.preventDefault());
part("load").addEventListener("click", async ({ currentTarget: button }) => {
  button.disabled = true;
  say("Loading the runtime …");
  try {
    release = await load();
    button.hidden = true;
    form.elements.tokens.focus({ preventScroll: true });
    update();
  } catch (error) {
    button.disabled = false;
    say(`The runtime did not load: ${error.message}.`);
  }
});
form.hidden = false;
part("absent").hidden = true;
update();
