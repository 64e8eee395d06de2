// The map and the output as tables: coloured for the eye, numbers for a screen reader.

const SCHEMES = {
  light: { low: [255, 255, 255], high: [8, 48, 107] },
  dark: { low: [32, 36, 47], high: [154, 208, 245] },
};

/** One table a head: a row a query, a column a key. */
export function maps(tokens, heads, weights, allowed) {
  return Array.from({ length: heads }, (_, head) =>
    box(
      `Attention map of head ${head + 1}`,
      table(
        `Head ${head + 1} of ${heads}`,
        tokens,
        tokens.map((token, i) => [
          token,
          ...tokens.map((_, j) => {
            if (!allowed(i, j)) return cell("–", "masked");
            const weight = weights[(head * tokens.length + i) * tokens.length + j];
            return coloured(cell(weight.toFixed(2).replace("0.", ".")), weight);
          }),
        ]),
      ),
    ),
  );
}

/** The output, a row a token and a column a channel, head after head. */
export function numbers(tokens, heads, output) {
  const width = output.length / heads / tokens.length;
  const channels = Array.from({ length: heads * width }, (_, channel) => [
    Math.floor(channel / width),
    channel % width,
  ]);
  const rows = tokens.map((token, i) => [
    token,
    ...channels.map(([head, place]) => cell(output[(head * tokens.length + i) * width + place].toFixed(4))),
  ]);
  const names = channels.map(([head, place]) => `${head + 1}.${place}`);
  return box("Output of the graph", table("Columns: head and channel", names, rows));
}

function table(caption, columns, rows) {
  const element = make("table", { className: "playground-table" });
  element.append(make("caption", { textContent: caption }));
  const heading = element.createTHead().insertRow();
  heading.append(cell(""), ...columns.map((name) => header(name, "col")));
  const body = element.createTBody();
  for (const [name, ...cells] of rows) body.insertRow().append(header(name, "row"), ...cells);
  return element;
}

/** A box that scrolls by itself, by keys too. */
function box(label, content) {
  const element = make("div", { className: "playground-box", tabIndex: 0, role: "region", ariaLabel: label });
  element.append(content);
  return element;
}

function header(text, scope) {
  const element = make("th", { scope, title: text });
  element.append(make("span", { textContent: text }));
  return element;
}

function cell(text, className = "") {
  return make("td", { textContent: text, className });
}

/** Give a cell, for each colour scheme, the colour of its weight and black or white on it. */
function coloured(element, weight) {
  for (const [scheme, { low, high }] of Object.entries(SCHEMES)) {
    const mixed = low.map((from, channel) => Math.round(from + weight * (high[channel] - from)));
    element.style.setProperty(`--${scheme}`, `rgb(${mixed})`);
    element.style.setProperty(`--${scheme}-text`, luminance(mixed) > 0.18 ? "#000" : "#fff");
  }
  return element;
}

/** WCAG 2.1, relative luminance. */
function luminance(colour) {
  const [red, green, blue] = colour.map((channel) => {
    const share = channel / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

function make(name, properties) {
  return Object.assign(document.createElement(name), properties);
}
