// What the theme does when it is used: copying, searching, tabs and colour schemes.

const { withTab } = require("./tab.cjs");

async function check(site, tabbed) {
  for (const [scheme, width] of [
    ["light", 1280],
    ["dark", 390],
  ]) {
    await withTab(site, "/", { scheme, width }, async (page, where) => {
      await copies(site, page, where);
      await hovers(site, page, where);
      await asks(site, page, where, "what is a head", "heads");
      await searches(site, page, where, "scaled_dot_product_attention");
    });
  }
  await withTab(site, tabbed, {}, (page, where) => tabs(site, page, where));
  await withTab(site, "/", {}, (page, where) => schemes(site, page, where));
}

/** Each button beside code that is shown copies that code; of a terminal, the commands without prompts. */
async function copies({ findings }, page, where) {
  const blocks = await page.locator(".highlight:visible:has(pre > code)").all();
  findings.expect(where, "has code to copy", blocks.length > 0);
  for (const block of blocks) {
    const code = await block.locator("pre > code").evaluate((shown) => {
      const typed = shown.cloneNode(true);
      for (const part of typed.querySelectorAll(".gp, .go")) part.remove();
      return typed.textContent.trim();
    });
    await page.evaluate(() => navigator.clipboard.writeText(""));
    await block.hover();
    await block.locator("[data-clipboard-target], [data-md-type=copy]").first().click();
    const copied = (await page.evaluate(() => navigator.clipboard.readText())).trimEnd();
    findings.expect(where, "the button copies the code", copied === code, JSON.stringify(copied.slice(0, 80)));
  }
}

/** The text of a button can be read while the mouse is over it (WCAG 2.1, 4.5 to 1). */
async function hovers({ findings }, page, where) {
  const buttons = await page.locator(".md-typeset .md-button:visible").all();
  findings.expect(where, "has buttons", buttons.length > 0);
  for (const button of buttons) {
    await button.hover();
    await page.waitForTimeout(300); // the theme fades to the colour
    const contrast = await button.evaluate((shown) => {
      const parts = (colour) => colour.match(/[\d.]+/g).slice(0, 3).map((part) => part / 255);
      const linear = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
      const luminance = (colour) =>
        parts(colour).map(linear).reduce((sum, part, n) => sum + [0.2126, 0.7152, 0.0722][n] * part, 0.05);
      const { color, backgroundColor } = getComputedStyle(shown);
      const [low, high] = [luminance(color), luminance(backgroundColor)].sort((a, b) => a - b);
      return high / low;
    });
    findings.expect(where, "a button can be read under the mouse", contrast >= 4.5, contrast.toFixed(2));
  }
}

/** The words of a question that name nothing do not count: its first answer is the section of the noun. */
async function asks({ findings }, page, where, question, section) {
  await type(page, question);
  await findings.attempt(where, `the search answers "${question}"`, async () => {
    await page.locator(".md-search-result__item").first().locator(`[href$="#${section}"]`).waitFor();
  });
  await page.locator("[data-md-component=search-query]").fill("");
  await page.keyboard.press("Escape");
}

/** A search for a name leads to its place in the reference. */
async function searches({ findings }, page, where, name) {
  await type(page, name);
  await findings.attempt(where, `search finds ${name}`, async () => {
    await page.locator(`.md-search-result__link[href$="#sdpa_xp.${name}"]`).click();
    await page.waitForURL(/\/reference\//);
    await page.locator(`[id="sdpa_xp.${name}"]`).waitFor();
  });
}

async function type(page, words) {
  const query = page.locator("[data-md-component=search-query]");
  const button = page.locator(".md-header__button[for=__search]");
  await ((await button.isVisible()) ? button : query).click();
  await query.pressSequentially(words);
}

/** Choosing a tab chooses it in all sets that have it, also when the page is opened again. */
async function tabs({ findings }, page, where) {
  const [name, count] = await page.evaluate(commonLabel);
  await page.locator(".tabbed-labels label", { hasText: name }).last().click();
  for (const time of ["at once", "later"]) {
    if (time === "later") {
      const address = page.url();
      await page.goto("about:blank"); // a reload would keep the state of forms
      await page.goto(address);
    }
    const chosen = await page.evaluate(chosenTabs, name);
    findings.expect(
      where,
      `linked tabs show ${name} ${time}`,
      chosen.length === count && chosen.every(Boolean),
      chosen,
    );
  }
}

/** The button changes the colour scheme, and the next page keeps it. */
async function schemes({ findings }, page, where) {
  const scheme = () => page.locator("body").getAttribute("data-md-color-scheme");
  const ground = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  const before = [await scheme(), await ground()];
  await page.locator("[data-md-component=palette] label:visible").click();
  findings.expect(
    where,
    "the button changes the scheme",
    before[0] === "default" && (await scheme()) === "slate",
  );
  findings.expect(where, "and the colours with it", (await ground()) !== before[1]);
  await page.reload();
  findings.expect(where, "the scheme is kept", (await scheme()) === "slate");
}

// What follows runs in the page.

/** The label that most sets of tabs have and do not show, and how many have it. */
function commonLabel() {
  const labels = [...document.querySelectorAll(".tabbed-set > .tabbed-labels > label:not(:first-child)")];
  const counts = new Map();
  for (const { textContent } of labels) counts.set(textContent, (counts.get(textContent) ?? 0) + 1);
  return [...counts].sort(([, a], [, b]) => b - a)[0];
}

/** Of each set that has the label, whether it shows what belongs to it. */
function chosenTabs(name) {
  return [...document.querySelectorAll(".tabbed-set")].flatMap((set) => {
    const labels = [...set.querySelectorAll(":scope > .tabbed-labels > label")];
    const place = labels.findIndex(({ textContent }) => textContent === name);
    const blocks = set.querySelectorAll(":scope > .tabbed-content > .tabbed-block");
    return place < 0 ? [] : [blocks[place].checkVisibility()];
  });
}

module.exports = { check };
