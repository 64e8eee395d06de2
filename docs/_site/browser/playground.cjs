// The playground: its graphs compute, agree with the formula in float64, and a link carries what is chosen.

const { readFileSync } = require("node:fs");
const path = require("node:path");

const { faults, overflow } = require("./pages.cjs");
const { withTab } = require("./tab.cjs");

const TEMPERATURES = ["-2", "0", "3"]; // powers of two
const ADDRESS = "/playground/";
const TYPED = path.resolve(__dirname, "../../../build/typed.json"); // what Python computes
const PLAIN = { mask: "none", softcap: "0", temperature: "0" };
const ODD = 'a"b \\c 100% d&e=f g+h #i é 猫 <b> \'j';

async function check(site) {
  await withTab(site, ADDRESS, {}, (...opened) => opens(site, ...opened));
  await withTab(site, ADDRESS, {}, (...opened) => computes(site, ...opened));
  await withTab(site, ADDRESS, {}, (...opened) => links(site, ...opened));
  await withTab(site, ADDRESS, {}, (...opened) => types(site, ...opened));
  await withTab(site, ADDRESS, {}, (...opened) => fits(site, ...opened));
  await withTab(site, ADDRESS, { scheme: "dark", width: 390 }, (...opened) => looks(site, ...opened));
  await withTab(site, ADDRESS, { prepare: () => delete window.WebAssembly }, async (page, where) => {
    await page.click("#playground-load");
    const said = page.locator("#playground-status", { hasText: "has no WebAssembly" });
    await site.findings.attempt(where, "says that there is no WebAssembly", () => said.waitFor());
  });
}

/** The page shows a map and what is seen in it before it reads a file; masks are chosen by picture and by key. */
async function opens({ findings }, page, where, requests) {
  await page.waitForSelector("#playground-maps table");
  const large = requests.filter((url) => /onnxruntime-web|\.bin$|\.onnx$/.test(url));
  findings.none(where, "requests for files before something is chosen", large);
  const note = page.locator("#playground-note");
  const told = async () => (await note.textContent()).match(/attends most to “(.+)” \((.+)\)/)?.slice(1);
  const first = await told();
  const mask = (value) => page.locator(`#playground-form input[value=${value}]`);
  const says = (what, hasText) =>
    findings.attempt(where, what, () => page.locator("#playground-status", { hasText }).waitFor());

  await mask("causal").locator("..").locator("svg").click({ force: true });
  await says("computes in JavaScript", "No graph has run yet");
  findings.expect(where, "a picture chooses its mask", await mask("causal").isChecked());
  findings.expect(where, "a mask shows its pairs", (await page.locator("td.masked").count()) > 0);
  const masked = await note.textContent();
  findings.expect(where, "the note is left out under a mask", masked.startsWith("In this map"), masked);
  await page.keyboard.press("ArrowLeft");
  findings.expect(where, "an arrow chooses the mask before", await mask("none").isChecked());
  await page.waitForFunction(() => !document.querySelector("td.masked"));
  const again = await told();
  findings.expect(where, "opens with the map that it computes", String(first) === String(again), `${first} ${again}`);

  await page.locator("#playground-heads label").nth(5).click();
  const caption = page.locator("#playground-maps caption", { hasText: "Head 5 of 12" });
  await findings.attempt(where, "shows the head that is chosen", () => caption.waitFor());
}

async function computes({ findings }, page, where, requests) {
  const ofRuntime = () => requests.filter((url) => url.includes("/onnxruntime-web/"));
  await page.click("#playground-load");
  const status = page.locator("#playground-status");
  await status.filter({ hasText: "ran in onnxruntime-web" }).waitFor();
  const loaded = ofRuntime().some((url) => url.endsWith(".wasm"));
  findings.expect(where, "loads the runtime", loaded);

  const { text, ...choices } = await page.evaluate(() => {
    const { text, mask, heads, softcap } = document.getElementById("playground-form").elements;
    const values = (choice) => [...(choice.options ?? choice)].map(({ value }) => value);
    return { text: values(text), mask: values(mask), heads: values(heads), softcap: values(softcap) };
  });
  const own = combinations({ text: ["own"], ...choices, temperature: TEMPERATURES });
  const { mask, softcap } = choices;
  const [first] = text;
  const sentences = text.filter((name) => !["own", "typed"].includes(name)).map((name) => ({ text: name, mask: "none", softcap: "0" }));
  const encoder = combinations({ text: [first], mask, softcap, temperature: ["-2"] });
  for (const chosen of [...own, ...encoder]) await agrees(findings, page, where, chosen);
  for (const chosen of sentences) await agrees(findings, page, where, { ...chosen, temperature: "0" });

  const words = { text: "own", tokens: "the cat saw the dog" };
  const before = await page.evaluate(compute, words);
  const after = await page.evaluate(compute, { ...words, tokens: "the cat saw the bird" });
  const same = String(before.cells) === String(after.cells);
  findings.expect(where, "another word gives another map", !same, after.cells.join(" "));
  const names = after.names.join(" ");
  findings.expect(where, "the map names the words", names === "the cat saw the bird", names);
  const long = await page.evaluate(compute, { tokens: Array(70).fill("word").join(" ") });
  findings.expect(where, "takes 64 words", long.names.length === 64, long.names.length);
  const cut = "Only 64 of 70 words are shown.";
  findings.expect(where, "says what it leaves out", long.status.startsWith(cut), long.status);
  await page.fill("#playground-form [name=tokens]", "");
  await findings.attempt(where, "asks for a word", () =>
    status.filter({ hasText: "at least one word" }).waitFor(),
  );
}

/** A reader's own sentence, by keys alone: the encoder loads with a bar, and computes what Python does. */
async function types({ findings }, page, where, requests) {
  const status = page.locator("#playground-status");
  await page.focus("[name=text]");
  await page.keyboard.press("End");
  await page.keyboard.press("ArrowUp"); // the last text but one
  findings.expect(where, "a key chooses it", (await page.locator("[name=text]").inputValue()) === "typed");
  await status.filter({ hasText: "loads it once" }).waitFor();
  findings.expect(where, "shows no map yet", (await page.locator("#playground-maps table").count()) === 0);
  const large = requests.filter((url) => /onnxruntime-web|encoder/.test(url) && !url.endsWith("encoder.js"));
  findings.none(where, "requests for the encoder before it is asked for", large);
  const told = Number((await page.textContent("#playground-load")).match(/\((\d+) MB\)/)[1]);
  await page.evaluate(watchBar);
  await page.focus("[name=sentence]");
  await page.keyboard.press("Enter");
  await status.filter({ hasText: "ran in onnxruntime-web" }).waitFor();
  const { max, values } = await page.evaluate(() => window.bar);
  const loaded = values.at(-1) / 1e6;
  findings.expect(where, "loads as many MB as it told", max === told * 1e6 && Math.abs(loaded - told) <= 1, loaded);
  findings.expect(where, "the bar moves", new Set(values).size > 3, values.length);
  findings.expect(where, "the bar goes", await page.locator("#playground-progress").isHidden());

  for (const expected of fromPython()) await isOfPython(findings, page, where, expected);
  findings.expect(where, "says what it leaves out", /^Only 64 of \d+ tokens are shown/.test(await status.textContent()));

  await page.fill("[name=sentence]", "The bird sang.");
  await page.locator("#playground-maps thead", { hasText: "bird" }).waitFor();
  await page.click("#playground-copy");
  await page.locator("#playground-copied", { hasText: "copied" }).waitFor();
  const link = await page.evaluate(() => navigator.clipboard.readText());
  await page.goto("about:blank");
  await page.goto(link);
  await status.filter({ hasText: "loads it once" }).waitFor();
  const sentence = await page.inputValue("[name=sentence]");
  findings.expect(where, "a link carries the sentence", sentence === "The bird sang.", sentence);
}

/** Sentences, with the tokens and the weights that Python computes. */
function fromPython() {
  return JSON.parse(readFileSync(TYPED, "utf8"));
}

async function isOfPython(findings, page, where, { sentence, tokens, weights }) {
  const seen = await agrees(findings, page, where, { ...PLAIN, text: "typed", sentence });
  const expect = (what, holds, detail) =>
    findings.expect(`${where} “${sentence.slice(0, 40)}”`, what, holds, detail);
  expect("its tokens are those of Python", String(seen.tokens) === String(tokens), seen.tokens.join(" "));
  const off = Math.max(...weights.map((weight, pair) => Math.abs(weight - seen.weights[pair])));
  // Four layers round, each as the last one may.
  const near = seen.weights.length === weights.length && off <= 4 * seen.bounds.weights;
  expect("its weights are those of Python", near, off);
}

/** Own words and an own sentence on WebGPU, which computes the same. */
async function onWebGPU(site) {
  const { findings } = site;
  await withTab(site, ADDRESS, {}, async (page, where) => {
    await page.selectOption("[name=on]", "webgpu");
    await page.selectOption("[name=text]", "typed");
    await page.click("#playground-load");
    const status = page.locator("#playground-status", { hasText: "on WebGPU" });
    await status.waitFor({ timeout: 60_000 });
    const sentences = fromPython();
    for (const expected of [sentences[0], sentences.at(-1)]) await isOfPython(findings, page, where, expected);
    for (const mask of ["none", "future"])
      await agrees(findings, page, where, { ...PLAIN, text: "own", heads: "2", mask });
    const said = await status.textContent();
    findings.expect(where, "runs on WebGPU", !said.includes("refused"), said);
  });
}

/** On a screen of 1280 by 900, the map stands beside its controls, and both can be seen without scrolling. */
async function fits({ findings }, page, where) {
  const box = (selector) => page.locator(selector).boundingBox();
  const [map, controls, status] = [
    await box("#playground-maps table"),
    await box("#playground-settings"),
    await box("#playground-status"),
  ];
  findings.expect(where, "the map stands beside the controls", map.x >= controls.x + controls.width);
  const low = Math.max(map.y + map.height, status.y + status.height);
  findings.expect(where, "the map is seen without scrolling", low <= 900, low);
}

function combinations(choices) {
  return Object.entries(choices).reduce(
    (found, [name, values]) => found.flatMap((chosen) => values.map((value) => ({ ...chosen, [name]: value }))),
    [{}],
  );
}

/** The graph of a choice computes what the formula does, and the page shows and says so. */
async function agrees(findings, page, where, chosen) {
  const expect = (what, holds, detail) =>
    findings.expect(`${where} ${JSON.stringify(chosen)}`, what, holds, detail);
  const seen = await page.evaluate(compute, chosen);
  const { text, mask, heads = "12", softcap, temperature } = chosen;
  const asked = `${text} ${mask} ${text === "own" ? heads : "12"} ${softcap} ${2 ** temperature}`;
  expect("computes what is chosen", seen.asked === asked, seen.asked);
  for (const [name, error] of Object.entries(seen.errors)) {
    const told = seen.status.includes(`${name} ${error.toExponential(1)}`);
    const bound = seen.bounds[name];
    expect(`${name} agrees with float64`, error <= bound, `${error} beyond ${bound}`);
    expect(`${name}: its error is told`, told, seen.status);
  }
  expect("rows of weights sum to 1, or to 0 without a key", seen.sums <= seen.bounds.sums, seen.sums);
  expect("the map shows the weights of the graph", seen.shown <= 0.006, seen.shown);
  return seen;
}

/** A link brings back what was chosen; what it says wrongly is ignored and told. */
async function links({ findings, base }, page, where) {
  const field = (name) => page.locator(`#playground-form [name=${name}]`);
  const chosen = { text: "own", heads: "4", softcap: "4" };
  for (const [name, value] of Object.entries(chosen)) await field(name).selectOption(value);
  await field("tokens").fill(ODD);
  await page.locator("#playground-form input[value=chunks]").check();
  await page.locator("#playground-heads label").nth(2).click();
  await page.click("#playground-copy");
  await page.locator("#playground-copied", { hasText: "copied" }).waitFor();
  const link = await page.evaluate(() => navigator.clipboard.readText());
  await page.goto("about:blank");
  await page.goto(link);
  await page.locator("#playground-maps caption", { hasText: "Head 2 of 4" }).waitFor();
  const expected = JSON.stringify({ ...chosen, tokens: ODD, mask: "chunks" });
  const found = JSON.stringify(await page.evaluate(state, [...Object.keys(chosen), "tokens", "mask"]));
  findings.expect(where, "a link carries the state", found === expected, found);

  await page.goto("about:blank");
  await page.goto(`${base}${ADDRESS}#text=none&mask=diagonal&temperature=99&head=12&heads=3&on=moon&other=1`);
  const status = page.locator("#playground-status", { hasText: "No graph has run yet" });
  await status.waitFor();
  const told = await status.textContent();
  for (const wrong of ["text=none", "mask=diagonal", "temperature=99", "head=12", "heads=3", "on=moon", "other=1"])
    findings.expect(where, `says that ${wrong} is ignored`, told.includes(`The link's ${wrong} is not known`), told);
  const [mask] = Object.values(await page.evaluate(state, ["mask"]));
  findings.expect(where, "a wrong link leaves the mask", mask === "none", mask);
}

/** All that can be shown is within 390 px and can be read on a dark page. */
async function looks({ findings }, page, where) {
  const words = Array.from({ length: 64 }, (_, place) => `word${place}`).join(" ");
  for (const chosen of [{ mask: "future" }, { text: "typed" }, { text: "own", tokens: "a b c" }, { tokens: words }]) {
    const what = Object.keys(chosen).join(" and ");
    for (const [name, value] of Object.entries(chosen))
      if (name === "text") await page.selectOption("[name=text]", value);
      else if (name === "mask") await page.locator(`input[value=${value}]`).check();
      else await page.fill("[name=tokens]", value);
    await page.locator("#playground-status", { hasText: /No graph has run yet|loads it once/ }).waitFor();
    findings.none(where, `${what}: wider than 390 px`, await page.evaluate(overflow));
    findings.none(where, `${what}: accessibility`, await faults(page, {}));
  }
}

// What follows runs in the page.

/** Choose, wait for the graph, and compare all that it gave. */
async function compute(chosen) {
  const form = document.getElementById("playground-form");
  const computed = new Promise((resolve) => form.addEventListener("computed", resolve, { once: true }));
  for (const [name, value] of Object.entries(chosen)) form.elements[name].value = value;
  form.elements.softcap.dispatchEvent(new Event("input", { bubbles: true }));
  const said = () => document.getElementById("playground-status").textContent;
  const late = new Promise((_, reject) =>
    setTimeout(() => reject(new Error(`${JSON.stringify(chosen)}: ${said()}`)), 10_000),
  );
  const { detail } = await Promise.race([computed, late]);
  const { graph, reference, inputs, length, heads, head } = detail;
  const worst = (found, expected) => {
    if (!found.length || found.length !== expected.length) return NaN;
    return expected.reduce((most, number, place) => Math.max(most, Math.abs(found[place] - number)), 0);
  };
  const rows = Array.from({ length: heads * length }, (_, row) =>
    graph.weights.slice(row * length, (row + 1) * length),
  );
  const texts = (selector) =>
    [...document.querySelectorAll(`#playground-maps ${selector}`)].map(({ textContent }) => textContent);
  const cells = texts("tbody td");
  // What float32 may round: a score is a sum over channels, for the encoder of sums over its 384.
  const largest = (numbers) => numbers.reduce((most, number) => Math.max(most, Math.abs(number)), 0);
  const epsilon = 2 ** -23;
  const width = inputs.query.length / heads / length;
  const terms = width + (detail.text === "own" ? 0 : 384);
  const norm = (numbers) => {
    const rows = Array.from({ length: heads * length }, (_, row) => numbers.slice(row * width, (row + 1) * width));
    return Math.max(...rows.map((row) => Math.hypot(...row)));
  };
  const score = detail.scale * norm(inputs.query) * norm(inputs.key) * Math.sqrt(terms) * epsilon;
  const weight = 2 * score + (length + 4) * epsilon;
  const bounds = {
    weights: weight,
    output: (weight + (length + Math.sqrt(terms)) * epsilon) * largest(inputs.value),
    sums: (length + 4) * epsilon,
  };
  return {
    asked: `${detail.text} ${detail.mask} ${heads} ${detail.softcap} ${detail.temperature}`,
    bounds,
    errors: { output: worst(graph.output, reference.output), weights: worst(graph.weights, reference.weights) },
    sums: Math.max(
      ...rows
        .map((row) => [0, 1].map((sum) => Math.abs(row.reduce((a, b) => a + b, 0) - sum)))
        .map((off) => Math.min(...off)),
    ),
    cells,
    tokens: detail.tokens,
    weights: [...graph.weights],
    names: texts(".playground-box:first-child thead th"),
    shown: worst(
      cells.map((text) => Number(text.replace("–", "0"))),
      graph.weights.slice(head * length * length, (head + 1) * length * length),
    ),
    status: said(),
  };
}

/** Keep what the bar shows. */
function watchBar() {
  const bar = document.getElementById("playground-progress");
  window.bar = { values: [] };
  new MutationObserver(() => {
    window.bar.max = bar.max;
    window.bar.values.push(bar.value);
  }).observe(bar, { attributes: true, attributeFilter: ["value"] });
}

function state(names) {
  const { elements } = document.getElementById("playground-form");
  return Object.fromEntries(names.map((name) => [name, elements[name].value]));
}

module.exports = { check, onWebGPU };
