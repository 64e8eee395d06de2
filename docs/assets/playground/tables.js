// The map and the output of a head as tables: coloured for the eye, numbers for a screen reader.

const SCHEMES = {
  light: { low: [255, 255, 255], high: [8, 48, 107] },
  dark: { low: [32, 36, 47], high: [154, 208, 245] },
};

const MANY = 24; // tokens, from which cells are too small to show their numbers

/** The map of a head: a row a query, a column a key. */
export function map({ tokens, head, heads, length, row }, weights, allowed) {
  const rows = tokens.map((token, i) => [
    token,
    ...tokens.map((key, j) => {
      if (!allowed(i, j)) return cell("–", "masked");
      const weight = weights[(head * length + i) * length + j];
      const share = weight.toFixed(2).replace("0.", ".");
      return Object.assign(coloured(cell(share), weight), { title: `${token} → ${key}: ${share}` });
    }),
  ]);
  const element = table(`Head ${head} of ${heads}, counted from 0`, tokens, rows);
  element.classList.toggle("many", length > MANY);
  if (row !== undefined) element.tBodies[0].rows[row].classList.add("marked");
  return box(`Attention map of head ${head}`, element);
}

/** In words, where the marked row of a map is strongest. */
export function strongest({ tokens, head, length, row }, weights) {
  const shares = [...weights.subarray((head * length + row) * length, (head * length + row + 1) * length)];
  const most = Math.max(...shares);
  if (most === 0) return `With this mask, “${tokens[row]}” may attend to no token.`;
  return `In this map, “${tokens[row]}” attends most to “${tokens[shares.indexOf(most)]}” (${most.toFixed(2)}).`;
}

/** The output of a head, a row a token and a column a channel. */
export function numbers({ tokens, head, heads, length }, output) {
  const width = output.length / heads / length;
  const channels = [...Array(width).keys()];
  const rows = tokens.map((token, i) => [
    token,
    ...channels.map((channel) => cell(output[(head * length + i) * width + channel].toFixed(4))),
  ]);
  return box(`Output of head ${head}`, table(`Head ${head}, columns: channels`, channels.map(String), rows));
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
