// The built site in a browser: every page, in both colour schemes, on a wide and a narrow screen.
// `make docs-check` builds build/site and runs this; CHROMIUM names another browser than Debian's.

const os = require("node:os");
const path = require("node:path");
const { chromium } = require("playwright-core");

const features = require("./features.cjs");
const guide = require("./guide.cjs");
const pages = require("./pages.cjs");
const playground = require("./playground.cjs");
const { Findings } = require("./findings.cjs");
const { pagesOf, serve } = require("./server.cjs");

const ROOT = path.resolve(__dirname, "../../../build/site");
const ARGUMENTS = [
  "--disable-gpu",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
  "--no-first-run",
  "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", // a request to another host is seen, and goes nowhere
];

async function main() {
  const findings = new Findings();
  const server = await serve(ROOT);
  const browser = await chromium.launch({
    executablePath: process.env.CHROMIUM || "/usr/bin/chromium",
    args: process.getuid?.() === 0 ? [...ARGUMENTS, "--no-sandbox"] : ARGUMENTS,
  });
  try {
    const site = { browser, base: `http://127.0.0.1:${server.address().port}`, findings };
    const found = await pagesOf(ROOT);
    const jobs = found.flatMap((page) =>
      ["light", "dark"].map((scheme) => () => pages.visit(site, page, scheme)),
    );
    jobs.unshift(() => playground.check(site));
    await Promise.all(Array.from({ length: os.availableParallelism() + 1 }, () => work(jobs)));
    await pages.links(site);
    await guide.check(site);
    await features.check(site, pages.tabbed());
  } finally {
    await browser.close();
    server.close();
  }
  return findings.report();
}

async function work(jobs) {
  while (jobs.length) await jobs.shift()();
}

main().then(
  (failed) => (process.exitCode = failed ? 1 : 0),
  (error) => {
    console.error(error);
    process.exitCode = 1;
  },
);
