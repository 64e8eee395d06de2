// The built site over http.

const fs = require("node:fs/promises");
const http = require("node:http");
const path = require("node:path");

const TYPES = {
  ".css": "text/css",
  ".html": "text/html; charset=utf-8",
  ".js": "text/javascript",
  ".json": "application/json",
  ".mjs": "text/javascript",
  ".onnx": "application/octet-stream",
  ".png": "image/png",
  ".svg": "image/svg+xml",
  ".wasm": "application/wasm",
  ".woff2": "font/woff2",
  ".xml": "application/xml",
};

/** A server of the folder on a free port of this machine. */
async function serve(root) {
  const server = http.createServer(async (request, response) => {
    const asked = decodeURIComponent(new URL(request.url, "http://site").pathname);
    const file = path.join(root, asked.endsWith("/") ? `${asked}index.html` : asked);
    try {
      const content = await fs.readFile(file);
      response.writeHead(200, { "content-type": TYPES[path.extname(file)] ?? "text/plain" }).end(content);
    } catch {
      response.writeHead(404).end();
    }
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  return server;
}

/** The addresses of all pages. */
async function pagesOf(root) {
  const files = await fs.readdir(root, { recursive: true });
  const pages = files
    .filter((file) => file.endsWith(".html"))
    .map((file) => `/${file.replace(/(^|\/)index\.html$/, "$1")}`);
  if (!pages.includes("/")) throw new Error(`${root} holds no site: run make docs`);
  return pages.sort();
}

module.exports = { pagesOf, serve };
