// A tab of the browser that notes what goes wrong in it.

/** Open an address with a colour scheme and a width, and run `act` on the page; then note what it complained of. */
async function withTab(site, address, { scheme = "light", width = 1280, prepare = undefined }, act) {
  const where = `${address} (${scheme})`;
  const context = await site.browser.newContext({
    colorScheme: scheme,
    permissions: ["clipboard-read", "clipboard-write"],
    viewport: { width, height: 900 },
  });
  const faults = { console: [], request: [], host: [] };
  context.on("console", (message) => {
    if (["error", "warning"].includes(message.type())) faults.console.push(message.text());
  });
  context.on("weberror", (error) => faults.console.push(error.error().message));
  context.on("request", (request) => {
    if (!/^(data:|blob:)/.test(request.url()) && !request.url().startsWith(`${site.base}/`)) faults.host.push(request.url());
  });
  context.on("requestfailed", (request) => faults.request.push(`${request.url()} ${request.failure().errorText}`));
  context.on("response", (response) => {
    if (response.status() >= 400) faults.request.push(`${response.url()} ${response.status()}`);
  });
  try {
    const page = await context.newPage();
    page.setDefaultTimeout(15_000);
    if (prepare) await page.addInitScript(prepare);
    await site.findings.attempt(where, "opens and can be used", async () => {
      await page.goto(site.base + address, { waitUntil: "load" });
      await act(page, where);
    });
  } finally {
    await context.close();
  }
  site.findings.none(where, "errors and warnings in the console", faults.console);
  site.findings.none(where, "requests that fail", faults.request);
  site.findings.none(where, "requests to another host", faults.host);
}

module.exports = { withTab };
