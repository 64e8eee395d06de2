// The playground: its graphs compute, and agree with the formula in float64.

const { withTab } = require("./tab.cjs");

const BOUND = 1e-5;
const TEMPERATURES = ["-2", "0", "3"]; // powers of two
const ADDRESS = "/playground/";

async function check(site) {
  await withTab(site, ADDRESS, {}, (...opened) => computes(site, ...opened));
  await withTab(site, ADDRESS, { prepare: () => delete window.WebAssembly }, async (page, where) => {
    await page.click("#playground-load");
    const said = page.locator("#playground-status", { hasText: "has no WebAssembly" });
    await site.findings.attempt(where, "says that there is no WebAssembly", () => said.waitFor());
  });
}

async function computes({ findings }, page, where, requests) {
  const ofRuntime = () => requests.filter((url) => url.includes("/onnxruntime-web/"));
  await page.waitForSelector("#playground-maps table");
  findings.none(where, "requests for the runtime before it is asked for", ofRuntime());
  await page.click("#playground-load");
  const status = page.locator("#playground-status");
  await status.filter({ hasText: "ran in onnxruntime-web" }).waitFor();
  findings.expect(
    where,
    "loads the runtime",
    ofRuntime().some((url) => url.endsWith(".wasm")),
  );

  const choices = await page.evaluate(() => {
    const { mask, heads, softcap } = document.getElementById("playground-form").elements;
    return Object.fromEntries(
      [mask, heads, softcap].map(({ name, options }) => [name, [...options].map(({ value }) => value)]),
    );
  });
  const combinations = Object.entries({ ...choices, temperature: TEMPERATURES }).reduce(
    (found, [name, values]) => found.flatMap((chosen) => values.map((value) => ({ ...chosen, [name]: value }))),
    [{}],
  );
  for (const chosen of combinations) await agrees(findings, page, where, chosen);

  const before = await page.evaluate(compute, { tokens: "the cat saw the dog" });
  const after = await page.evaluate(compute, { tokens: "the cat saw the bird" });
  const same =
    before.cells.length === after.cells.length &&
    before.cells.every((text, place) => text === after.cells[place]);
  findings.expect(where, "another token gives another map", !same, after.cells.join(" "));
  findings.expect(
    where,
    "the map names the tokens",
    after.names.join(" ") === "the cat saw the bird",
    after.names.join(" "),
  );
  await page.fill("#playground-form [name=tokens]", "");
  await findings.attempt(where, "asks for a word", () =>
    status.filter({ hasText: "at least one word" }).waitFor(),
  );
}

/** The graph of a choice computes what the formula does, and the page shows and says so. */
async function agrees(findings, page, where, chosen) {
  const expect = (what, holds, detail) =>
    findings.expect(`${where} ${JSON.stringify(chosen)}`, what, holds, detail);
  const seen = await page.evaluate(compute, chosen);
  const { mask, heads, softcap, temperature } = chosen;
  expect(
    "computes what is chosen",
    seen.asked === `${mask} ${heads} ${softcap} ${2 ** temperature}`,
    seen.asked,
  );
  for (const [name, error] of Object.entries(seen.errors)) {
    const told = seen.status.includes(`${name} ${error.toExponential(1)}`);
    expect(`${name} agrees with float64`, error <= BOUND, error);
    expect(`${name}: its error is told`, told, seen.status);
  }
  expect("rows of weights sum to 1, or to 0 without a key", seen.sums <= BOUND, seen.sums);
  expect("the map shows the weights of the graph", seen.shown <= 0.006, seen.shown);
}

// What follows runs in the page.

/** Choose, wait for the graph, and compare all that it gave. */
async function compute(chosen) {
  const form = document.getElementById("playground-form");
  const computed = new Promise((resolve) => form.addEventListener("computed", resolve, { once: true }));
  for (const [name, value] of Object.entries(chosen)) form.elements[name].value = value;
  form.elements.mask.dispatchEvent(new Event("input", { bubbles: true }));
  const said = () => document.getElementById("playground-status").textContent;
  const late = new Promise((_, reject) =>
    setTimeout(() => reject(new Error(`${JSON.stringify(chosen)}: ${said()}`)), 10_000),
  );
  const { detail } = await Promise.race([computed, late]);
  const { graph, reference, length, heads } = detail;
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
  return {
    asked: `${detail.mask} ${heads} ${detail.softcap} ${detail.temperature}`,
    errors: { output: worst(graph.output, reference.output), weights: worst(graph.weights, reference.weights) },
    sums: Math.max(
      ...rows
        .map((row) => [0, 1].map((sum) => Math.abs(row.reduce((a, b) => a + b, 0) - sum)))
        .map((off) => Math.min(...off)),
    ),
    cells,
    names: texts(".playground-box:first-child thead th"),
    shown: worst(
      cells.map((text) => Number(text.replace("–", "0"))),
      graph.weights,
    ),
    status: said(),
  };
}

module.exports = { check };
