// Each query of queries.json finds its place first, in the search of the built site. It needs no browser.

const path = require("node:path");

const expected = require("./queries.json");
const { open } = require("./site_search.cjs");

async function main(root) {
  const search = await open(root);
  let failed = 0;
  for (const [query, place] of Object.entries(expected)) {
    const [first = [], ...others] = await search(query);
    if (first[0] === place) continue;
    failed++;
    const seen = [first, ...others].map(([best]) => best);
    console.log(`FAILED search for "${query}": ${seen.slice(0, 3).join(", ") || "nothing"} instead of ${place}`);
  }
  console.log(`search: ${Object.keys(expected).length - failed} passed, ${failed} failed`);
  process.exitCode = failed ? 1 : 0;
}

main(process.argv[2] || path.resolve(__dirname, "../../../build/site"));
