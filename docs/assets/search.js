// The search of the theme finds all words that begin with a word of the query, so that the "a" of "what is a head" finds
// every word with an a in front. Words that ask, and name nothing, are therefore left out of what the worker gets.
const FILLERS = new Set(
  "a an and are as at be by can do does for how i in is it my no of on or that the there this to use using what when where which why with".split(" "),
);
const QUERY = 2; // among the messages of the theme

/** The query without its fillers. The last word stays, because it may still be typed. */
function withoutFillers(query) {
  const words = query.split(/\s+/);
  const last = words.pop();
  const kept = words.filter((word) => !FILLERS.has(word.toLowerCase()));
  return [...kept, last].join(" ");
}

const { postMessage } = Worker.prototype;
Worker.prototype.postMessage = function (message, ...options) {
  const isQuery = message?.type === QUERY && typeof message.data === "string" && !message.data.includes('"');
  postMessage.call(this, isQuery ? { ...message, data: withoutFillers(message.data) } : message, ...options);
};
