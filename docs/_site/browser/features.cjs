// What the theme does when it is used: copying, searching, tabs and colour schemes.

const { withTab } = require("./tab.cjs");

async function check(site) {
  for (const [scheme, width] of [["light", 1280], ["dark", 390]]) {
    await withTab(site, "/", { scheme, width }, async (page, where) => {
      await copies(site, page, where);
      await searches(site, page, where, "scaled_dot_product_attention");
    });
  }
  await withTab(site, "/", {}, (page, where) => tabs(site, page, where));
  await withTab(site, "/", {}, (page, where) => schemes(site, page, where));
}

/** Each button beside code that is shown copies that code. */
async function copies({ findings }, page, where) {
  const blocks = await page.locator(".highlight:visible:has(pre > code)").all();
  findings.expect(where, "has code to copy", blocks.length > 0);
  for (const block of blocks) {
    const code = (await block.locator("pre > code").textContent()).trimEnd();
    await page.evaluate(() => navigator.clipboard.writeText(""));
    await block.hover();
    await block.locator("[data-clipboard-target], [data-md-type=copy]").first().click();
    const copied = (await page.evaluate(() => navigator.clipboard.readText())).trimEnd();
    findings.expect(where, "the button copies the code", copied === code, JSON.stringify(copied.slice(0, 80)));
  }
}

/** A search for a name leads to its place in the reference. */
async function searches({ findings }, page, where, name) {
  const query = page.locator("[data-md-component=search-query]");
  if (!(await query.isVisible())) await page.locator("label[for=__search]:visible").first().click();
  await query.fill(name);
  await findings.attempt(where, `search finds ${name}`, async () => {
    await page.locator(`.md-search-result__link[href$="#sdpa_xp.${name}"]`).click();
    await page.waitForURL(/\/reference\//);
    await page.locator(`[id="sdpa_xp.${name}"]`).waitFor();
  });
}

/** Choosing a tab chooses it wherever it is, also on the next page. */
async function tabs({ findings }, page, where) {
  const label = page.locator(".tabbed-labels label").nth(2);
  const name = await label.textContent();
  await label.click();
  for (const visit of ["at once", "after a reload"]) {
    if (visit !== "at once") await page.reload();
    const sets = await page.locator(".tabbed-set", { has: page.locator("label", { hasText: name }) }).all();
    findings.expect(where, `has tabs named ${name} ${visit}`, sets.length > 0);
    for (const set of sets) {
      const chosen = await set.evaluate((element) => {
        const place = [...element.querySelectorAll(":scope > input")].findIndex((input) => input.checked);
        const block = element.querySelectorAll(":scope > .tabbed-content > .tabbed-block")[place];
        return block.checkVisibility() && element.querySelectorAll(":scope > .tabbed-labels > label")[place].textContent;
      });
      findings.expect(where, `linked tabs show ${name} ${visit}`, chosen === name, chosen);
    }
  }
}

/** The button changes the colour scheme, and the next page keeps it. */
async function schemes({ findings }, page, where) {
  const scheme = () => page.locator("body").getAttribute("data-md-color-scheme");
  const ground = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  const before = [await scheme(), await ground()];
  await page.locator("[data-md-component=palette] label:visible").click();
  findings.expect(where, "the button changes the scheme", before[0] === "default" && (await scheme()) === "slate");
  findings.expect(where, "and the colours with it", (await ground()) !== before[1]);
  await page.reload();
  findings.expect(where, "the scheme is kept", (await scheme()) === "slate");
}

module.exports = { check };
