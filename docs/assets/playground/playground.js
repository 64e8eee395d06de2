// The playground: settings and a text in; the maps, the graph's output and its error out.

import { thumbnails } from "./heads.js";
import { read, write } from "./link.js";
import { attention, MASKS } from "./reference.js";
import { load, PLACES, run, runtimes } from "./runtime.js";
import { map, numbers, strongest } from "./tables.js";
import { opening, OWN, prepared } from "./texts.js";

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
  const { inputs, feeds, ...facts } = await prepared(form, chosen);
  Object.assign(chosen, facts);
  if (!chosen.length) return say("Write at least one word.");
  if (head >= chosen.heads) head = 0;
  chosen.head = head;
  const reference = attention(inputs, chosen);
  const runtime = runtimes.get(chosen.place);
  const graph = runtime && (await run(chosen.place, chosen.model, feeds, chosen.weights));
  show(chosen, graph || reference);
  const cut = chosen.left ? [`Only the first ${chosen.length} of ${chosen.length + chosen.left} words are shown.`] : [];
  const told = graph ? verdict(chosen, graph, reference, runtime) : "Computed in JavaScript, float64. No graph has run yet.";
  say([...ignored, ...cut, told].join(" "));
  form.dispatchEvent(new CustomEvent("computed", { detail: { ...chosen, inputs, reference, graph } }));
}

/** Show the controls that the choice has. */
function arrange({ text: name, temperature, place }) {
  part("own").hidden = part("counts").hidden = name !== OWN;
  part("temperature").textContent = temperature.toPrecision(2);
  form.elements.temperature.setAttribute("aria-valuetext", temperature.toPrecision(2));
  const button = part("load");
  button.hidden = runtimes.has(place);
  button.textContent = `Check with onnxruntime${place === "wasm" ? "" : " for WebGPU"} (${PLACES[place].megabytes} MB)`;
}

function show(chosen, { weights, output }) {
  thumbnails(part("heads"), chosen, weights);
  const note = chosen.mask === "none" ? `${chosen.note} ` : ""; // what it says need not hold under a mask
  part("note").textContent = chosen.note ? note + strongest(chosen, weights) : "";
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
form.addEventListener("submit", (event) => event.preventDefault());
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
part("load").addEventListener("click", async ({ currentTarget: button }) => {
  button.disabled = true;
  say("Loading the runtime …");
  try {
    await load(on.value);
    update();
  } catch (error) {
    say(`The runtime did not load: ${error.message}.`);
  }
  button.disabled = false;
});

if (navigator.gpu) part("places").hidden = false;
else on.querySelector("[value=webgpu]").remove();
head = Number(text.selectedOptions[0].dataset.head ?? 0);
form.hidden = false;
part("absent").hidden = true;
if (!follow()) open();
