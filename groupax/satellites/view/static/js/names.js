// Short forms of the names of runs that still tell them apart.

const WORDS = /([-_./ =,]+)/;
const MIN_NAMES = 3; // must have a word that is omitted, unless all have it
const MIN_OMITTED = 6; // characters; anything shorter is not worth a mark of omission

/**
 * Returns the short form of each name: words that most names have are an ellipsis.
 *
 * `sweep-model0.5B-lr1e-6-seed1` and `sweep-model0.5B-lr2e-6-seed2` are `…-lr1e-6-seed1` and `…-lr2e-6-seed2`. A short
 * form that two names would share, or that has no word, is not used.
 */
export function shortNames(names) {
  const words = names.map((name) => name.split(WORDS));
  const counts = new Map();
  for (const word of words.flatMap((each) => [...new Set(each)])) counts.set(word, (counts.get(word) ?? 0) + 1);
  const isCommon = (word) => names.length > 1 && (counts.get(word) === names.length || (counts.get(word) >= MIN_NAMES && counts.get(word) > names.length / 2));
  const shorts = words.map((each) => withoutCommon(each, isCommon));
  const isGood = (short) => short.replace("…", "").replace(WORDS, "") && shorts.indexOf(short) === shorts.lastIndexOf(short);
  return new Map(names.map((name, index) => [name, isGood(shorts[index]) ? shorts[index] : name]));
}

/** Replaces the stretches of words that are common by an ellipsis, with the separators inside them. */
function withoutCommon(words, isCommon) {
  let text = "";
  let omitted = "";
  const flush = () => {
    const [, start, , end] = omitted.match(/^([-_./ =,]*)(.*?)([-_./ =,]*)$/s);
    text += omitted.length - start.length - end.length >= MIN_OMITTED ? `${start}…${end}` : omitted;
    omitted = "";
  };
  for (const word of words) {
    if (isCommon(word) || WORDS.test(word)) {
      omitted += word;
    } else {
      flush();
      text += word;
    }
  }
  flush();
  return text;
}
