// The tokenizer of the encoder: text is cleaned and cut into words as BERT does, and each word into the longest pieces
// that the vocabulary has (Schuster and Nakajima, "Japanese and Korean voice search", 2012).

const SPECIAL = /(\[(?:PAD|UNK|CLS|SEP|MASK)\])/; // tokens that stand for themselves, also in a text
const DROPPED = /(?![\t\n\r])[\p{Cc}\p{Cf}\p{Co}\uFFFD]/gu;
const SPACE = /\p{White_Space}+/u;
const MARK = /\p{Mn}/gu;
const PUNCTUATION = /([\p{P}$+<=>^`|~])/u;
const IDEOGRAPH =
  /([\u3400-\u4DBF\u4E00-\u9FFF\uF900-\uFAFF\u{20000}-\u{2A6DF}\u{2A700}-\u{2B81F}\u{2B920}-\u{2CEAF}\u{2F800}-\u{2FA1F}])/gu;
const LONGEST_WORD = 100; // characters; a longer word is unknown

/** A function from a text to its tokens, [CLS] and [SEP] included. */
export function tokenizer(vocabulary) {
  const known = new Set(vocabulary);
  const inner = (part) => (SPECIAL.test(part) ? [part] : words(part).flatMap((word) => pieces(word, known)));
  return (text) => ["[CLS]", ...text.split(SPECIAL).flatMap(inner), "[SEP]"];
}

function words(text) {
  const spaced = text.replace(DROPPED, "").replace(IDEOGRAPH, " $1 ");
  // One by one, as the last sigma of a word is no other letter here.
  const plain = [...spaced.normalize("NFD").replace(MARK, "")].map((letter) => letter.toLowerCase()).join("");
  return plain.split(SPACE).flatMap((word) => word.split(PUNCTUATION)).filter(Boolean);
}

function pieces(word, known) {
  const letters = [...word];
  if (letters.length > LONGEST_WORD) return ["[UNK]"];
  const found = [];
  for (let start = 0, end; start < letters.length; start = end) {
    const piece = () => (start ? "##" : "") + letters.slice(start, end).join("");
    for (end = letters.length; end > start && !known.has(piece()); ) end--;
    if (end === start) return ["[UNK]"];
    found.push(piece());
  }
  return found;
}
