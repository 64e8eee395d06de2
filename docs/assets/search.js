// The search of the theme finds all words that begin with a word of the query: the "a" of "what is a head" finds every word
// with an a in front, and "not available" finds "notebook". So the worker gets no words that ask and name nothing, and it
// gets short words with a boost of 1, for which it searches whole words.
const FILLERS = new Set(
  "a an and are as at be by can do does for how i in is it my no not of on or that the there this to use using what when where which why with sdpa-xp sdpa_xp $".split(" "),
);
// Among the messages of the theme.
const SETUP = 0;
const QUERY = 2;
const RESULT = 3;

// What a query means that its words do not say: a pattern, and the word to search for. Pasted errors of onnxruntime and of
// Python come first.
const MEANT = [
  [/ONNXRuntimeError|No Op registered|find an implementation|is under development|missing from input feed|Non-zero status|cannot be reshaped|registered function|Unexpected input data type|INVALID_PROTOBUF/i, "invalid_argument"],
  [/^AttributeError: module|\bmodule '\w+' has no attribute/i, "isdtype"],
  [/\bNo module named\b/i, "modulenotfounderror"],
  [/\b(missing \d+ required|positional arguments?\b|unexpected keyword)/i, "misnamed"],
  [/\bwhy\b.*\bcache|\bcache.*\bworks?\b/i, "decoder"],
  [/^what (is|are) (an? |the )?((quer(y|ies)|keys?|values?|transformers?|encoders?|decoders?)(,| and)? ?)+\??$/i, "glossary"],
  [/^what does (?!true|false)\w+ mean\??$/i, "glossary"],
  [/\bdata-apis?\b/i, "consortium"],
  [/\b(macos|mac os|linux)\b/i, "macos"],
  [/\b(numpy|torch|pytorch|jax|onnx) ?[<>=~]*\d|\b(numpy|torch|jax) versions?\b/i, "supports"],
  [/^why (do (we|you) )?scale\b/i, "sqrt"],
  [/^(how does|what is|explain) attention( works?)?\??$/i, "attends"],
  [/\b(not|never|un|been) ?(been )?(run|tested|tried)\b/i, "untested"],
  [/^first steps$/i, "started"],
  [/^att?ention masks?$/i, "mask"],
  [/\b(faster|slower) than\b/i, "benchmark"],
  [/\bdifferent dtypes?\b/i, "arrays of one library"],
  [/^true (means|or false)|what does true mean/i, "inverted"],
  [/\bshape mismatch/i, "mismatched"],
  [/^(api )?stability$/i, "semver"],
  [/\b(onnx|export\w*)\b.*\bcache|\bcache\b.*\b(onnx|export)/i, "past_key_values"],
  [/\b(onnx|export\w*)\b.*\b(rope|rotary)|\b(rope|rotary)\b.*\b(onnx|export)/i, "ndonnx"],
  [/\btoken by token\b/i, "decoding"],
  [/\b(pull request|submit|bug|issues?|patch|PR)\b(?!.*onnxruntime)/, "contribute"],
  [/^(S|L) ?= ?0$/, "subclasses"],
  [/\btrain\w*\b.*\b(layers?|multi|mha)\b/i, "adam"],
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

const spelled = (word) => SPELLED[word.toLowerCase()] ?? word;

// What a query belongs to: hits below this address come first. A message of sdpa_xp begins with the name of the function,
// "function: `key` must ...; got key.shape=(4, 3)", but people paste any part of it.
const PLACES = [
  [/^(\w+Error: |[a-z]\w+(\.\w+)*: )|: `|[;)] got\b|^got \w+[.=]/, "reference/errors/"],
  [/^`?\w+`? (and `?\w+`? )?must\b|^must be (an? )?\w+|\bmust be a multiple\b|\bneither true nor false/, "reference/errors/"],
  [/^(\$ ?)?sdpa-xp |^--\w|\bno such option/i, "reference/command-line/"],
  [/^(\$ ?)?make [a-z-]+$/, "project/#run-the-tests"],
];

// How often each word occurs in the site, also as a part of a name, and all of these words in one text. Other spellings count
// as words too, so that a typing mistake in them is seen.
const counts = new Map(Object.keys(SPELLED).map((word) => [word, 1]));
let vocabulary = "";

function learn(docs) {
  const texts = docs.map(({ title, text, words = "", parts = "" }) => `${title} ${text} ${words} ${parts}`);
  for (const name of texts.join(" ").toLowerCase().match(/[a-z_]{3,}/g))
    for (const word of new Set([name, ...name.split("_")])) counts.set(word, (counts.get(word) ?? 0) + 1);
  vocabulary = ` ${[...counts.keys()].join(" ")} `;
}

/** A word that the site has. For a typing mistake it is the word that was meant, for another form of a word its beginning. */
function corrected(word) {
  const knows = (length) => vocabulary.includes(` ${word.slice(0, length).toLowerCase()}`);
  if (!/^[a-z_]{4,}$/i.test(word) || knows(word.length)) return word;
  const near = [...counts.keys()]
    .map((other) => ({ other, count: edits(word.toLowerCase(), other) }))
    .sort((a, b) => a.count - b.count || counts.get(b.other) - counts.get(a.other))[0];
  if (near.count === 1) return near.other;
  for (let length = word.length - 1; length > 4 && length >= 0.75 * word.length; length--)
    if (knows(length)) return word.slice(0, length);
  return near.count === 2 && word.length > 7 ? near.other : word;
}

/** The letters to add, drop, change or swap with the next one that turn a word into another: the Damerau-Levenshtein distance. */
function edits(word, other) {
  if (Math.abs(word.length - other.length) > 2) return Infinity;
  const rows = [[...Array(other.length + 1).keys()]];
  for (let i = 1; i <= word.length; i++) {
    rows.push([i]);
    for (let j = 1; j <= other.length; j++) {
      const isSame = word[i - 1] === other[j - 1];
      const isSwapped = i > 1 && j > 1 && word[i - 1] === other[j - 2] && word[i - 2] === other[j - 1];
      rows[i][j] = Math.min(
        rows[i - 1][j] + 1,
        rows[i][j - 1] + 1,
        rows[i - 1][j - 1] + (isSame ? 0 : 1),
        isSwapped ? rows[i - 2][j - 2] + 1 : Infinity,
      );
    }
  }
  return rows[word.length][other.length];
}

/** The query without its fillers, and with its short words as whole words, but for the last, which may still be typed. */
function forWorker(query) {
  const meant = MEANT.find(([pattern]) => pattern.test(query));
  if (meant) return meant[1];
  const words = query
    .split(/[\s`'"(),;:=]+/)
    .map((word) => word.replace(/^[-+]+|[.?!]$/g, "")) // lunr would exclude what follows a "-"
    .filter((word) => word && !FILLERS.has(word.toLowerCase()))
    .map((word) => spelled(corrected(spelled(word))));
  if (!words.length) return query;
  const last = words.pop();
  const whole = !words.length && vocabulary.includes(` ${last.toLowerCase()} `) ? [`${last}^1`] : [];
  return [...words.map((word) => word.replace(/^\w{1,6}$/, "$&^1")), ...whole, last].join(" ");
}

/** Sort the hits: those below the place first, and those with all words of the query before those with some. */
function sort(groups, place) {
  const value = ({ location, score, terms }) => {
    const found = Object.values(terms);
    const share = found.length ? found.filter(Boolean).length / found.length : 1;
    return score * share ** 8 + (place && location.startsWith(place) ? 1e6 : 0);
  };
  const most = (group) => Math.max(...group.map(value));
  groups.forEach((group) => group.sort((a, b) => value(b) - value(a)));
  groups.sort((a, b) => most(b) - most(a));
}

globalThis.Worker = class extends Worker {
  #places = []; // of the queries without an answer so far

  constructor(...args) {
    super(...args);
    this.addEventListener("message", ({ data: message }) => {
      if (message?.type !== RESULT) return;
      sort(message.data.items, this.#places.shift());
    });
  }

  postMessage(message, ...options) {
    if (message?.type === SETUP) learn(message.data.docs);
    if (message?.type === QUERY) {
      const query = message.data.trim();
      this.#places.push(PLACES.find(([pattern]) => pattern.test(query))?.[1]);
      const isExact = /^[-+]?"/.test(query);
      super.postMessage({ ...message, data: isExact ? query : forWorker(query) }, ...options);
    } else super.postMessage(message, ...options);
  }
};
