// The search of the theme finds all words that begin with a word of the query: the "a" of "what is a head" finds every word
// with an a in front, and "not available" finds "notebook". So the worker gets no words that ask and name nothing, and it
// gets short words with a boost of 1, for which it searches whole words.
const FILLERS = new Set(
  "a an and are as at be by can do does for how i in is it my no not of on or that the there this to use using what when where which why with".split(" "),
);
// Among the messages of the theme.
const SETUP = 0;
const QUERY = 2;

// What a query means that its words do not say: a pattern, and the word to search for. Pasted errors come first: of
// onnxruntime, of Python, and of sdpa_xp, "function: `key` must ...; got key.shape=(4, 3)" or its beginning.
const MEANT = [
  [/ONNXRuntimeError|No Op registered|find an implementation|is under development|missing from input feed/i, "invalid_argument"],
  [/\bNo module named\b/i, "modulenotfounderror"],
  [/\b(missing \d+ required|positional arguments?\b|unexpected keyword)/i, "unexpected"],
  [/^(\w+Error: |[a-z]\w+(\.\w+)*: )|: `|[;)] got\b/, "errors"],
  [/^`\w+` (and `\w+` )?must\b/, "errors"],
  [/\bwhy\b.*\bcache|\bcache.*\bworks?\b/i, "decoder"],
  [/^what (is|are) (an? |the )?((quer(y|ies)|keys?|values?|transformers?|encoders?|decoders?)(,| and)? ?)+\??$/i, "glossary"],
  [/^what does (?!true|false)\w+ mean\??$/i, "glossary"],
  [/\bdata-apis?\b/i, "consortium"],
  [/\b(macos|mac os|linux)\b/i, "macos"],
  [/\b(numpy|torch|pytorch|jax|onnx) ?[<>=~]*\d/i, "supports"],
  [/^why (do (we|you) )?scale\b/i, "sqrt"],
  [/\b(not|never|un) ?(been )?(run|tested|tried)\b/i, "untested"],
  [/^first steps$/i, "started"],
  [/^true (means|or false)|what does true mean/i, "inverted"],
  [/\bshape mismatch/i, "mismatched"],
  [/^(api )?stability$/i, "semver"],
  [/\b(load|my|own|pretrained) weights\b/i, "checkpoint"],
  [/\bfell back\b/i, "fallback"],
];
// The search has no stems: "masking" does not find "mask".
const SPELLED = {
  behavior: "behaviour",
  color: "colour",
  broadcasting: "broadcast",
  casual: "causal",
  colors: "colours",
  visualization: "visualise",
  exporting: "export",
  installing: "install",
  masking: "mask",
  neighbor: "neighbour",
  verifying: "verify",
  visualize: "visualise",
};

// All words of the site, each after a space.
let vocabulary = "";

function learn(docs) {
  const texts = docs.map(({ title, text, words = "", parts = "" }) => `${title} ${text} ${words} ${parts}`);
  vocabulary = ` ${[...new Set(texts.join(" ").toLowerCase().match(/[a-z]{3,}/g))].join(" ")} `;
}

/** The word, or if no word of the site begins with it, the search for words that differ from it by a typing mistake. */
function corrected(word) {
  const isMistake = /^[a-z]{4,}$/i.test(word) && !vocabulary.includes(` ${word.toLowerCase()}`);
  return isMistake ? `${word}~${word.length < 8 ? 1 : 2}` : word;
}

/** The query without its fillers, and with its short words as whole words, but for the last, which may still be typed. */
function forWorker(query) {
  const meant = MEANT.find(([pattern]) => pattern.test(query.trim()));
  if (meant) return meant[1];
  const words = query
    .trim()
    .split(/\s+/)
    .map((word) => word.replace(/^[-+](?=.)/, "")) // lunr would exclude what follows a "-"
    .map((word) => SPELLED[word.toLowerCase()] ?? corrected(word));
  const kept = words.filter((word) => !FILLERS.has(word.toLowerCase()));
  if (!kept.length) return query;
  const last = kept.pop();
  return [...kept.map((word) => word.replace(/^\w{1,6}$/, "$&^1")), last].join(" ");
}

const { postMessage } = Worker.prototype;
Worker.prototype.postMessage = function (message, ...options) {
  if (message?.type === SETUP) learn(message.data.docs);
  const isQuery = message?.type === QUERY && typeof message.data === "string" && !/^\s*[-+]?"/.test(message.data);
  postMessage.call(this, isQuery ? { ...message, data: forWorker(message.data) } : message, ...options);
};
