"""METEOR against published and hand-computed pairs, each marked by the variant it holds for."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from rl_reward_network.rewards import captions
from rl_reward_network.rewards.captions import meteor, meteor_variant, tokens

PARTY = (
    "It is a guide to action which ensures that the military always obeys the commands of the party",
    "It is a guide to action that ensures that the military will forever heed Party commands",
)
PUBLISHED = [  # prediction, reference, score to four digits
    (*PARTY, 0.6944),  # NLTK's own documentation
    ("non matching hypothesis", "this is a cat", 0.0),  # the same
    ("the cat sat on the mat", "the cat sat on the mat", 0.9977),  # Wikipedia, METEOR, examples
    ("the cat was sat on the mat", "the cat sat on the mat", 0.9654),
    ("on the mat sat the cat", "the cat sat on the mat", 0.5),
]
BY_HAND = [  # prediction, reference, score; words that WordNet may know as synonyms are in them
    ("a dark thin vessel", "a dark narrow vessel", 3 / 4 * (1 - 0.5 * (2 / 3) ** 3)),  # m 3, c 2: 0.638889
    ("vessels branching left", "the vessel branches left", 10 / 13 * (1 - 0.5 / 27)),  # P 1, R 3/4, c 1: 0.754986
]


@pytest.fixture
def fresh_probe() -> Iterator[None]:
    captions._wordnet.cache_clear()
    yield
    captions._wordnet.cache_clear()


@pytest.mark.parametrize(("prediction", "reference", "score"), PUBLISHED)
def test_published_pairs_in_both_variants(monkeypatch, prediction, reference, score):
    if meteor_variant() == "full":
        assert meteor([prediction], [reference]).round(4).tolist() == [score]
    monkeypatch.setattr(captions, "_wordnet", lambda: captions.NO_SYNONYMS)
    assert meteor_variant() == "exact+stem"
    assert meteor([prediction], [reference]).round(4).tolist() == [score]


@pytest.mark.parametrize(("prediction", "reference", "score"), BY_HAND)
def test_pairs_computed_by_hand(monkeypatch, prediction, reference, score):
    monkeypatch.setattr(captions, "_wordnet", lambda: captions.NO_SYNONYMS)
    assert meteor([prediction], [reference])[0] == pytest.approx(score, abs=1e-12)


def test_synonyms_match_in_the_full_variant(monkeypatch):
    lemmas = [SimpleNamespace(name=lambda word=word: word) for word in ("thin", "narrow")]
    narrow = SimpleNamespace(synsets=lambda word: [SimpleNamespace(lemmas=lambda: lemmas)] if word == "thin" else [])
    monkeypatch.setattr(captions, "_wordnet", lambda: narrow)
    assert meteor_variant() == "full"
    assert meteor(["a dark thin vessel"], ["a dark narrow vessel"])[0] == pytest.approx(1 - 0.5 / 64)


def test_short_perfect_captions_are_worth_one_when_normalised():
    predictions = ["vessel", "Blood vessel!", "the blood vessel", "", "nerve"]
    references = ["vessel", "blood vessel", "blood vessel", "vessel", "vessel"]
    plain, normalised = (meteor(predictions, references, normalise=normalise) for normalise in (False, True))
    longer = 2 / 3 / (0.9 * 2 / 3 + 0.1)  # P 2/3, R 1; one chunk of two as in the reference with itself
    assert plain.tolist() == pytest.approx([0.5, 0.9375, 0.9375 * longer, 0, 0])
    assert normalised.tolist() == pytest.approx([1, 1, longer, 0, 0])
    assert plain.dtype == normalised.dtype == np.float64


def test_punctuation_and_case_earn_nothing():
    assert tokens("A dark-blue Vessel, the surgeon's; 2.5 mm.") == [
        *("a", "dark", "blue", "vessel", "the", "surgeon", "s", "2", "5", "mm")
    ]
    assert tokens(" .,;!? ") == []
    assert meteor([], []).shape == meteor([], [], normalise=True).shape == (0,)
    assert meteor([". , ; !"], ["a vessel, dark; thin!"]).tolist() == [0]
    assert meteor(["THE VESSEL."], ["the vessel"]).tolist() == [0.9375]


@pytest.mark.parametrize(
    ("predictions", "references", "message"),
    [
        (["a", "b"], ["a"], "each prediction needs its reference, got 2 and 1"),
        (["a", "b"], ["a", ""], r"reference 1 has no word \(''\); leave the sample out"),
        (["a"], [" ?! "], r"reference 0 has no word \(' \?! '\)"),
        ("vessel", ["vessel"], "must be lists of captions, got one string"),
        (["vessel"], "vessel", "must be lists of captions, got one string"),
    ],
)
def test_bad_input(predictions, references, message):
    with pytest.raises(ValueError, match=message):
        meteor(predictions, references)


def test_nltk_is_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "nltk.translate", None)
    with pytest.raises(ValueError, match="package nltk: pip install"):
        meteor(["vessel"], ["vessel"])


def test_wordnet_is_looked_for_once_and_never_downloaded(fresh_probe, monkeypatch, tmp_path):
    import nltk

    asked: list[str] = []
    find = nltk.data.find
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    monkeypatch.setattr(nltk.data, "find", lambda name, paths=None: asked.append(name) or find(name, paths))
    monkeypatch.setattr(nltk, "download", lambda *_, **__: pytest.fail("nothing may be downloaded"))
    assert meteor_variant() == "exact+stem"
    assert {"corpora/wordnet", "corpora/wordnet.zip"} <= set(asked)
    asked.clear()
    assert meteor_variant() == "exact+stem"
    assert asked == []


@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_a_wordnet_that_cannot_be_read(fresh_probe, monkeypatch, tmp_path, kind):
    import nltk

    place = tmp_path / "corpora" / "wordnet"
    place.mkdir(parents=True)
    if kind == "zip":
        place.rmdir()
        place.with_suffix(".zip").write_bytes(b"not a zip")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    with pytest.raises(ValueError, match=r"corpora/wordnet .*cannot read it \(\w+\); delete"):
        meteor_variant()
