// What holds on every page.

const { readFileSync } = require("node:fs");
const { withTab } = require("./tab.cjs");

const AXE = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");
const seen = new Map(); // by page, its ids, its links and its sets of tabs

async function visit(site, address, scheme) {
  await withTab(site, address, { scheme, prepare: openShadows }, async (page, where) => {
    const { findings } = site;
    const body = page.locator("body");
    const expected = scheme === "dark" ? "slate" : "default";
    findings.expect(
      where,
      "follows the colour scheme",
      (await body.getAttribute("data-md-color-scheme")) === expected,
    );
    findings.none(where, "figures of the other scheme", await page.evaluate(figures, scheme));
    findings.none(where, "formulas that are not rendered", await page.evaluate(formulas));
    await findings.attempt(where, "diagrams are rendered", () => page.waitForFunction(diagrams));
    findings.none(where, "wider than 1280 px", await page.evaluate(overflow));
    findings.none(where, "accessibility", await faults(page, {}));
    if (scheme === "light") seen.set(address, await page.evaluate(contents));
    await page.setViewportSize({ width: 390, height: 844 });
    findings.none(where, "wider than 390 px", await page.evaluate(overflow));
    // Colours are the same at both widths and take the longest to look at; all else is the same in both schemes.
    if (scheme === "dark") return;
    findings.none(
      where,
      "accessibility at 390 px",
      await faults(page, { "color-contrast": { enabled: false } }),
    );
  });
}

/** Each link to another page of the site, or within one, leads to something. */
async function links({ base, findings }) {
  for (const [address, { hrefs }] of seen) {
    const dead = [];
    for (const href of new Set(hrefs)) {
      const target = new URL(href);
      if (target.origin !== base) continue;
      const known = seen.get(target.pathname);
      if (known) {
        const id = decodeURIComponent(target.hash.slice(1));
        if (id && !known.ids.includes(id)) dead.push(href.replace(base, ""));
      } else if (!(await fetch(href, { method: "HEAD" })).ok) dead.push(href.replace(base, ""));
    }
    findings.none(address, "links that lead nowhere", dead);
  }
}

/** The page with the most sets of tabs. */
function tabbed() {
  return [...seen].sort(([, a], [, b]) => b.tabs - a.tabs)[0][0];
}

/** What axe-core finds of serious or critical impact, with all that can be opened open. */
async function faults(page, rules) {
  if (!(await page.evaluate(() => "axe" in window))) await page.evaluate(AXE);
  const violations = await page.evaluate(
    async (options) => {
      document.querySelectorAll("details").forEach((element) => (element.open = true));
      await new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)));
      return (await window.axe.run(document, options)).violations;
    },
    { resultTypes: ["violations"], rules },
  );
  return violations
    .filter(({ impact }) => ["serious", "critical"].includes(impact))
    .map(
      ({ id, help, nodes }) =>
        `${id}, ${help}: ${nodes.length} such as ${nodes[0].html.replace(/\s+/g, " ").slice(0, 150)}`,
    );
}

// What follows runs in the page.

/** Let the check look into the closed shadow roots that the theme draws diagrams in. */
function openShadows() {
  const attach = Element.prototype.attachShadow;
  Element.prototype.attachShadow = function (options) {
    return attach.call(this, { ...options, mode: "open" });
  };
}

function figures(scheme) {
  const shown = (element) => element.checkVisibility();
  const other = scheme === "dark" ? ".figure-light" : ".figure-dark";
  return [...document.querySelectorAll(other)].filter(shown).map((element) => element.ariaLabel);
}

function formulas() {
  const rendered = (element) =>
    element.querySelector(".katex math, .katex .katex-mathml") && !element.querySelector(".katex-error");
  return [...document.querySelectorAll(".arithmatex")]
    .filter((element) => !rendered(element))
    .map((element) => element.textContent);
}

function diagrams() {
  const drawn = ({ shadowRoot }) => {
    const svg = shadowRoot?.querySelector("svg");
    return (
      svg &&
      !svg.querySelector(".error-icon") &&
      svg.getBoundingClientRect().height > 10 &&
      svg.textContent.trim()
    );
  };
  return !document.querySelector("pre.mermaid") && [...document.querySelectorAll("div.mermaid")].every(drawn);
}

function overflow() {
  const { scrollWidth, clientWidth } = document.documentElement;
  const scrolls = "pre, .figure, .katex-display, .md-typeset__scrollwrap, .playground-box";
  const beyond = (element) =>
    !element.closest(scrolls) && element.getBoundingClientRect().right > clientWidth + 1;
  if (scrollWidth <= clientWidth) return [];
  const first = [...document.querySelectorAll("main *")].find(beyond);
  return [`${scrollWidth} px, from ${first ? first.outerHTML.slice(0, 120) : "outside of main"}`];
}

function contents() {
  return {
    ids: [...document.querySelectorAll("[id]")].map(({ id }) => id),
    hrefs: [...document.querySelectorAll("a[href]")].map(({ href }) => href),
    tabs: document.querySelectorAll(".tabbed-set").length,
  };
}

module.exports = { faults, links, overflow, tabbed, visit };
