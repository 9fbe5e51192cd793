"""METEOR of captions by NLTK, without any download.

Formula, for m matched words in c chunks, p words predicted, r words in the reference: P = m / p, R = m / r,
F = P R / (0.9 P + 0.1 R), METEOR = F (1 - 0.5 (c / m)^3). Words match when they are equal, have one stem (Porter), or,
in the variant "full", are synonyms in WordNet. The variants give different numbers: report `meteor_variant()` with
every number. The Java METEOR 1.5 has other parameters and is not comparable to either.

Source: Lavie and Agarwal 2007, as in nltk.translate.meteor_score. NLTK aligns repeated words greedily from the right,
so the number of chunks of a repetitive caption can be too high.
"""

import functools
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from zipfile import BadZipFile

import numpy as np

REMEDY = "pip install -r requirements.txt"
NO_SYNONYMS = SimpleNamespace(synsets=lambda word: [])  # NLTK calls no other method of a WordNet


def meteor_variant() -> str:
    """ "full" if NLTK finds WordNet on this machine, else "exact+stem"; nothing is downloaded."""
    return "exact+stem" if _wordnet() is NO_SYNONYMS else "full"


def tokens(text: str) -> list[str]:
    """The words of `text` in lower case: runs of letters, digits and underscores."""
    # Punctuation is dropped: any two sentences share a full stop, so a policy could raise METEOR with commas.
    return re.findall(r"\w+", text.lower())


def meteor(predictions: Sequence[str], references: Sequence[str], normalise: bool = False) -> np.ndarray:
    """METEOR of each prediction with its one reference.

    Args:
        predictions: N captions; the score of a caption without a word is 0.
        references: N captions, each with at least one word.
        normalise: divide by the score of the reference with itself, which is 0.5 for one word, 0.94 for two and nearly
            1 for ten, so that a perfect prediction scores 1 at any length.

    Returns:
        float64 (N,) in [0, 1].

    Raises:
        ValueError: the lengths differ, a reference has no word, or NLTK is not installed.
    """
    check_pairs(predictions, references)
    for number, reference in enumerate(references):
        if not tokens(reference):
            raise ValueError(f"reference {number} has no word ({reference!r}); leave the sample out")
    predicted, expected = [tokens(text) for text in predictions], [tokens(text) for text in references]
    scores = np.array([_score(*pair) for pair in zip(predicted, expected, strict=True)], dtype=np.float64)
    if not normalise:
        return scores
    best = np.array([_score(words, words) for words in expected], dtype=np.float64)
    return np.minimum(scores / best, 1.0)


def _score(prediction: list[str], reference: list[str]) -> float:
    """METEOR of one pair of word lists."""
    library: Any = _nltk()
    return float(library.single_meteor_score(reference, prediction, wordnet=_wordnet()))


def _nltk() -> Any:
    """NLTK's METEOR module, imported lazily because the import takes over a second."""
    try:
        from nltk.translate import meteor_score
    except ImportError:
        raise ValueError(f"METEOR needs the package nltk: {REMEDY}") from None
    return meteor_score


@functools.cache
def _wordnet() -> Any:
    """NLTK's WordNet, or NO_SYNONYMS if it is not installed.

    Without this check NLTK would fail at the first word without an equal stem, possibly hours into a run.
    """
    _nltk()
    from nltk import data
    from nltk.corpus import wordnet

    try:
        if not any(_has(data, name) for name in ("corpora/wordnet", "corpora/wordnet.zip")):
            return NO_SYNONYMS
        wordnet.ensure_loaded()
    except (LookupError, OSError, BadZipFile) as error:
        raise ValueError(
            f"corpora/wordnet in one of {data.path}: NLTK cannot read it ({type(error).__name__}); delete it, or "
            "download it again with python -m nltk.downloader wordnet"
        ) from None
    return wordnet


def _has(data: Any, name: str) -> bool:
    """Whether NLTK finds `name` in one of its data folders."""
    try:
        data.find(name)
    except LookupError:
        return False
    return True


def check_pairs(predictions: Sequence[str], references: Sequence[str]) -> None:
    """Raise a ValueError unless both are lists of captions of the same length."""
    if isinstance(predictions, str) or isinstance(references, str):
        raise ValueError("predictions and references must be lists of captions, got one string")
    if len(predictions) != len(references):
        raise ValueError(f"each prediction needs its reference, got {len(predictions)} and {len(references)}")
