// The search of a built site in node: its own worker, run in a context that has what the worker uses of a browser.

const fs = require("node:fs");
const path = require("node:path");
const vm = require("node:vm");

/** The function that answers a query with the addresses of its hits, best first. */
async function open(root) {
  const worker = workerOf(root);
  const { config, docs } = JSON.parse(fs.readFileSync(path.join(root, "search/search_index.json"), "utf8"));
  await worker({ type: SETUP, data: { config, docs, options: { suggest: false } } });
  return async (query) => {
    const { data } = await worker({ type: QUERY, data: query });
    return data.items.map((group) => group.map(({ location }) => location));
  };
}

// As `SearchMessageType` of the theme numbers them.
const SETUP = 0;
const QUERY = 2;

/** The worker of the theme as a function: one message in, one out. */
function workerOf(root) {
  const folder = path.join(root, "assets/javascripts/workers");
  const [name] = fs.readdirSync(folder).filter((each) => /^search\.\w+\.min\.js$/.test(each));
  const handlers = [];
  let worker;
  let answered;
  class Worker {
    listeners = [];
    addEventListener(_, listener) {
      this.listeners.push(listener);
    }
    postMessage(message) {
      handlers.forEach((handler) => handler({ data: message }));
    }
  }
  const scope = vm.createContext({
    console,
    addEventListener: (_, handler) => handlers.push(handler),
    postMessage: (message) => {
      worker.listeners.forEach((listener) => listener({ data: message }));
      answered(message);
    },
  });
  scope.self = scope;
  vm.runInContext(fs.readFileSync(path.join(folder, name), "utf8"), scope);
  // The script of the site that changes what a page sends to its worker, and what it gets.
  const page = vm.createContext({ Worker });
  vm.runInContext(fs.readFileSync(path.join(root, "assets/search.js"), "utf8"), page);
  worker = new page.Worker();
  return (message) =>
    new Promise((resolve) => {
      answered = resolve;
      worker.postMessage(message);
    });
}

module.exports = { open };
