// A tab of the browser that notes what goes wrong in it.

/** Open an address, run `act(page, where, requests)` on it, and note what the browser complained of meanwhile.
 *
 * `prepare` runs in the page before its own scripts; `answer` answers the requests below the address. */
async function withTab(site, address, { scheme = "light", width = 1280, prepare, answer }, act) {
  const where = `${address} (${scheme})`;
  const context = await site.browser.newContext({
    colorScheme: scheme,
    permissions: ["clipboard-read", "clipboard-write"],
    viewport: { width, height: 900 },
  });
  const faults = { console: [], request: [] };
  context.on("console", (message) => {
    if (["error", "warning"].includes(message.type())) faults.console.push(message.text());
  });
  context.on("weberror", (error) => faults.console.push(error.error().message));
  const requests = [];
  context.on("request", (request) => requests.push(request.url()));
  context.on("requestfailed", (request) => {
    const why = request.failure().errorText;
    if (why !== "net::ERR_ABORTED") faults.request.push(`${request.url()} ${why}`); // that one: the page was left
  });
  context.on("response", (response) => {
    if (response.status() >= 400) faults.request.push(`${response.url()} ${response.status()}`);
  });
  try {
    const page = await context.newPage();
    page.setDefaultTimeout(15_000);
    if (prepare) await page.addInitScript(prepare);
    if (answer) await page.route(`${site.base}${address}**`, answer);
    await site.findings.attempt(where, "opens and can be used", async () => {
      await page.goto(site.base + address, { waitUntil: answer ? "commit" : "load" });
      await act(page, where, requests);
    });
  } finally {
    await context.close();
  }
  site.findings.none(where, "errors and warnings in the console", faults.console);
  site.findings.none(where, "requests that fail", faults.request);
  const elsewhere = requests.filter((url) => !/^(data|blob):/.test(url) && !url.startsWith(`${site.base}/`));
  site.findings.none(where, "requests to another host", elsewhere);
}

module.exports = { withTab };
