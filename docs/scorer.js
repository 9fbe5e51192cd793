// Order of search results: what helps to do something comes before the API and the history.
var Scorer = {
  score: ([docname, , , , score]) => {
    if (/^(how-to|tutorials)\//.test(docname)) return score + 20;
    if (/^reference\/api\/|^(changelog|log|genindex|py-modindex)$/.test(docname)) return score - 20;
    return score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: {0: 15, 1: 5, 2: -5},
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
