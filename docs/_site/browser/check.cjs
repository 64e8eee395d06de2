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
const COMMON = [
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
  "--no-first-run",
  "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", // a request to another host is seen, and goes nowhere
  ...(process.getuid?.() === 0 ? ["--no-sandbox"] : []),
];
const PLAIN = ["--disable-gpu"];
const WEBGPU = ["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader"]; // in software: right, and slow

async function main() {
  const findings = new Findings();
  const server = await serve(ROOT);
  const browser = await launch(PLAIN);
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
    await withWebGPU((other) => playground.onWebGPU({ ...site, browser: other }));
  } finally {
    await browser.close();
    server.close();
  }
  return findings.report();
}

function launch(more) {
  return chromium.launch({
    executablePath: process.env.CHROMIUM || "/usr/bin/chromium",
    args: [...COMMON, ...more],
  });
}

async function withWebGPU(act) {
  const browser = await launch(WEBGPU);
  try {
    await act(browser);
  } finally {
    await browser.close();
  }
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
