// A page of Dask's dashboard as a picture: `node dashboard.cjs ADDRESS FILE`.
// It says "ready" when the page is drawn, and takes the picture when its input ends.

const { chromium } = require("playwright-core");

async function main([address, file]) {
  const browser = await chromium.launch({
    executablePath: process.env.CHROMIUM || "/usr/bin/chromium",
    args: process.getuid?.() === 0 ? ["--disable-gpu", "--no-sandbox"] : ["--disable-gpu"],
  });
  try {
    const page = await browser.newPage({ viewport: { width: 1100, height: 620 } });
    await page.goto(address);
    await page.waitForSelector(".bk-Figure, .bk-CanvasPanel, canvas", { state: "attached" });
    console.log("ready");
    for await (const _ of process.stdin);
    await page.screenshot({ path: file });
  } finally {
    await browser.close();
  }
}

main(process.argv.slice(2)).catch((error) => {
  console.error(error);
  process.exitCode = 1;
});
