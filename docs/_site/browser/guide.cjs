// The page that the guide to deploying in the browser shows, as a reader would serve it.

const fs = require("node:fs/promises");
const path = require("node:path");

const { withTab } = require("./tab.cjs");

const MODEL = path.resolve(__dirname, "../../../build/guide.onnx"); // as the guide says to export it
const ADDRESS = "/how-to/deploy/";
const PACKAGE = "/onnxruntime-web/";

async function check(site) {
  const blocks = [];
  await withTab(site, ADDRESS, {}, async (page) => {
    const code = page.locator("pre code", { hasText: "<script" });
    blocks.push(...(await code.allTextContents()));
  });
  site.findings.expect(ADDRESS, "has one page to run", blocks.length === 1, blocks.length);
  for (const block of blocks) {
    const answer = async (route) => {
      const asked = new URL(route.request().url()).pathname;
      if (asked.endsWith(".onnx")) return route.fulfill({ body: await fs.readFile(MODEL) });
      if (!asked.includes(PACKAGE)) return route.fulfill({ contentType: "text/html", body: block });
      const address = `${site.base}/assets/vendor${asked.slice(asked.indexOf(PACKAGE))}`;
      return route.fulfill({ response: await route.fetch({ url: address }) });
    };
    await withTab(site, "/guide/", { answer }, async (page, where) => {
      const said = await page.waitForEvent("console", (message) => message.type() === "log");
      const printed = await said.args()[0].jsonValue();
      site.findings.expect(where, "computes an output", String(printed) === "1,8,5,64", printed);
    });
  }
}

module.exports = { check };
