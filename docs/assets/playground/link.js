// A link that carries the state of the form, behind its #.

const PLAIN = ["text", "mask", "softcap", "heads", "on"]; // of which the form has each value that may be
const WRITTEN = ["tokens", "sentence"];
const LAST_HEAD = 11;

/** Put what the link says into the form: gives what of it was ignored, and the head; null if it says nothing. */
export function read(form) {
  if (!location.hash.includes("=")) return null; // the link of a section
  const ignored = [];
  let head = null;
  for (const [name, escaped] of new URLSearchParams(location.hash.slice(1))) {
    const value = unescaped(escaped);
    if (PLAIN.includes(name) && known(form.elements[name], value)) form.elements[name].value = value;
    else if (WRITTEN.includes(name)) form.elements[name].value = value;
    else if (name === "temperature" && within(form.elements.temperature, value))
      form.elements.temperature.value = value;
    else if (name === "head" && /^\d+$/.test(value) && Number(value) <= LAST_HEAD) head = Number(value);
    else ignored.push(`The link's ${name}=${value} is not known here, and was ignored.`);
  }
  return { head, ignored };
}

/** Put the state of the form into the address of the page. */
export function write(form, head) {
  const { text, tokens, sentence, mask, softcap, heads, temperature, on } = form.elements;
  const own = {
    own: { tokens: tokens.value, heads: heads.value },
    typed: { sentence: sentence.value },
  }[text.value];
  const state = { text: text.value, ...own, mask: mask.value, head, softcap: softcap.value };
  Object.assign(state, { temperature: temperature.value }, on.value === "wasm" ? {} : { on: on.value });
  const entries = Object.entries(state).map(([name, value]) => [name, escaped(String(value))]);
  history.replaceState(null, "", `#${new URLSearchParams(entries)}`);
}

/** Twice encoded, as the theme looks for an element whose id is the decoded link, between quotes. */
function escaped(value) {
  return value.replace(/["\\%\n]/g, encodeURIComponent);
}

function unescaped(value) {
  try {
    return decodeURIComponent(value);
  } catch {
    return value;
  }
}

function known(element, value) {
  return [...(element.options ?? element)].some((choice) => choice.value === value);
}

function within({ min, max, step }, value) {
  return value !== "" && Number(value) >= min && Number(value) <= max && Number.isInteger((value - min) / step);
}
