// The playground: settings and a text in; the maps, the graph's output and its error out.

import * as encoder from "./encoder.js";
import { thumbnails } from "./heads.js";
import { read, write } from "./link.js";
import { attention, MASKS } from "./reference.js";
import { load, PLACES, run, runtimes } from "./runtime.js";
import { map, numbers, strongest } from "./tables.js";
import { opening, OWN, prepared, TYPED } from "./texts.js";

const part = (name) => document.getElementById(`playground-${name}`);
const form = part("form");
const { text, on } = form.elements;
let head = 0;
let ignored = []; // what the link asked for and the page does not have
let latest = 0;
let running = Promise.resolve();

/** What the form says; `scale` is rounded to float32, which is what the graph is given. */
function settings() {
  const { mask, softcap, temperature, on: place } = Object.fromEntries(new FormData(form));
  const warmth = 2 ** temperature;
  return { text: text.value, mask, softcap: Number(softcap), temperature: warmth, place };
}

/** Compute what the form says, unless it says something else by then. */
function update() {
  const turn = ++latest;
  running = running.then(() => turn === latest && compute()).catch(failed);
}

async function compute() {
  const chosen = settings();
  arrange(chosen);
  if (chosen.text === TYPED && missing(chosen)) return wait();
  const { inputs, feeds, ...facts } = await prepared(form, chosen);
  Object.assign(chosen, facts);
  if (!chosen.length) return say("Write at least one word.");
  if (head >= chosen.heads) head = 0;
  chosen.head = head;
  const reference = attention(inputs, chosen);
  const runtime = runtimes.get(chosen.place);
  const graph = runtime && (await run(chosen.place, chosen.model, feeds, chosen.weights));
  show(chosen, graph || reference);
  const units = chosen.text === TYPED ? "tokens" : "words";
  const cut = chosen.left ? [`Only ${chosen.length} of ${chosen.length + chosen.left} ${units} are shown.`] : [];
  const told = graph ? verdict(chosen, graph, reference, runtime) : "Computed in JavaScript, float64. No graph has run yet.";
  say([...ignored, ...cut, told].join(" "));
  form.dispatchEvent(new CustomEvent("computed", { detail: { ...chosen, inputs, reference, graph } }));
}

/** Show the controls that the choice has. */
function arrange(chosen) {
  const { text: name, temperature, place } = chosen;
  part("own").hidden = part("counts").hidden = name !== OWN;
  part("typed").hidden = name !== TYPED;
  part("temperature").textContent = temperature.toPrecision(2);
  form.elements.temperature.setAttribute("aria-valuetext", temperature.toPrecision(2));
  const button = part("load");
  const what = name === TYPED ? "Load the encoder" : "Check with onnxruntime";
  button.hidden = !missing(chosen);
  button.textContent = `${what}${place === "wasm" ? "" : " for WebGPU"} (${missing(chosen)} MB)`;
}

/** How many megabytes are to be loaded before a graph of the chosen text runs. */
function missing({ text: name, place }) {
  return (
    (runtimes.has(place) ? 0 : PLACES[place].megabytes) + (name === TYPED && !encoder.ready() ? encoder.MEGABYTES : 0)
  );
}

/** Show no map until the encoder is loaded. */
function wait() {
  part("heads").hidden = part("numbers").hidden = true;
  part("maps").replaceChildren();
  part("note").textContent = "The map of your sentence will be here.";
  say([...ignored, "The encoder runs in your browser, which loads it once. Nothing that you write leaves it."].join(" "));
}

function show(chosen, { weights, output }) {
  thumbnails(part("heads"), chosen, weights);
  const note = chosen.mask === "none" ? `${chosen.note} ` : ""; // what it says need not hold under a mask
  part("note").textContent = chosen.row === undefined ? "" : note + strongest(chosen, weights);
  part("maps").replaceChildren(map(chosen, weights, MASKS[chosen.mask]));
  part("numbers").hidden = !output;
  if (output) part("output").replaceChildren(numbers(chosen, output));
}

function verdict(chosen, graph, reference, { release, provider, refused }) {
  const [output, weights] = ["output", "weights"].map((name) =>
    worst(graph[name], reference[name]).toExponential(1),
  );
  return (
    `${refused ? `WebGPU was refused (${refused}). ` : ""}` +
    `${chosen.model}.onnx ran in onnxruntime-web ${release} on ${PLACES[provider].name}, ` +
    `in ${graph.milliseconds.toFixed(1)} ms. ` +
    `Largest error against float64: output ${output}, weights ${weights}.`
  );
}

/** The largest difference; NaN if one is. */
function worst(found, expected) {
  return expected.reduce((most, number, place) => Math.max(most, Math.abs(found[place] - number)), 0);
}

function say(words) {
  part("status").textContent = words;
}

function failed(error) {
  say(`The graph did not run: ${error.message}.`);
}

/** Show the map that the page has within. */
function open() {
  const chosen = settings();
  arrange(chosen);
  const { weights, ...facts } = opening(form);
  show({ ...chosen, ...facts, head }, { weights });
  say("Computed when this site was built. Change anything, and your browser computes the map.");
}

/** Take the state of the link, as far as the page has it; gives whether there is one. */
function follow() {
  const asked = read(form);
  if (!asked) return false;
  ignored = asked.ignored;
  head = asked.head ?? Number(text.selectedOptions[0].dataset.head ?? 0);
  update();
  return true;
}

form.addEventListener("input", ({ target }) => {
  ignored = [];
  if (target === text) head = Number(text.selectedOptions[0].dataset.head ?? 0);
  if (target.name === "head") head = Number(target.value);
  write(form, head);
  update();
});
window.addEventListener("hashchange", follow);
part("copy").addEventListener("click", async () => {
  write(form, head);
  try {
    await navigator.clipboard.writeText(location.href);
    part("copied").textContent = "The link is copied.";
  } catch {
    part("copied").textContent = "The browser lets no page copy. Copy the address of this page instead.";
  }
});
form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const chosen = settings();
  if (!missing(chosen)) return;
  const button = part("load");
  const bar = part("progress");
  Object.assign(bar, { hidden: false, value: 0, max: missing(chosen) * 1e6 });
  const count = (more) => (bar.value += more);
  button.disabled = true;
  say(`Loading ${missing(chosen)} MB …`);
  try {
    if (chosen.text === TYPED && !encoder.ready()) await encoder.load(count);
    if (!runtimes.has(chosen.place)) await load(chosen.place, count);
    update();
  } catch (error) {
    say(`The files did not load: ${error.message}.`);
  }
  button.disabled = false;
  bar.hidden = true;
});

if (navigator.gpu) part("places").hidden = false;
else on.querySelector("[value=webgpu]").remove();
head = Number(text.selectedOptions[0].dataset.head ?? 0);
form.hidden = false;
part("absent").hidden = true;
if (!follow()) open();
