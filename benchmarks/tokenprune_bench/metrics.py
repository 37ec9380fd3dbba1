# SPDX-License-Identifier: Apache-2.0
"""Metrics of answers: small functions, each with its source. A score lies in [0, 1]; CIDEr's in [0, 10]."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenprune.errors import OptionError, TokenPruneError

Answers = Sequence[str]
_NUMBERS = dict(zip("zero one two three four five six seven eight nine ten".split(), map(str, range(11)), strict=True))
_NUMBERS["none"] = "0"
_ARTICLES = {"a", "an", "the"}
_BLANKS = str.maketrans(dict.fromkeys('!"()+,-/;<=>?@[\\]_`{}', " "))


@dataclass(frozen=True)
class Metric:
    """A way to score answers.

    score: from all predictions and the accepted answers of each question to one score a question. graded: whether there
    are scores between right and wrong. right: from which score on an answer counts as right in McNemar's test and the
    hard split; None: no such score, so that there are neither.
    """

    name: str
    title: str
    score: Callable[[Sequence[str], Sequence[Answers]], list[float]]
    graded: bool = True
    right: float | None = 0.5


def score_best(score: Callable[[str, str], float]) -> Callable[[Sequence[str], Sequence[Answers]], list[float]]:
    """Turn a score against one answer into that against the accepted answer that fits best."""

    def scores(predictions: Sequence[str], accepted: Sequence[Answers]) -> list[float]:
        return [max(score(one, each) for each in some) for one, some in zip(predictions, accepted, strict=True)]

    return scores


def exact(prediction: str, answer: str) -> float:
    """1 if the two are equal but for case, blanks at the ends and full stops at the end."""
    return float(_plain(prediction) == _plain(answer))


def ending(prediction: str, answer: str) -> float:
    """1 if a sentence ends in the answer, compared as in `exact`: "the star is red" for "red"."""
    ours, theirs = _plain(prediction), _plain(answer)
    return float(ours == theirs or ours.endswith(f" {theirs}"))


def _plain(text: str) -> str:
    return text.strip().rstrip(".").strip().lower()


def vqa(predictions: Sequence[str], accepted: Sequence[Answers]) -> list[float]:
    """VQA accuracy: the mean, over all ways to leave one person's answer out, of min(1, people who agree / 3).

    Source: Antol et al., "VQA" (arXiv:1505.00468), section 3.2 and the evaluation's text rules: punctuation counts for
    nothing (but # $ % & * : ^ | ~ and decimal points), nor do articles, and numbers in words are numbers.
    Differs from the paper: apostrophes are dropped on both sides in place of its table of contractions, so that "its"
    is "it's". With fewer than four answers, where no answer could reach 1, one that agrees is enough. lmms-eval's
    TextVQA accuracy was equal on 20,000 random answers but for words that differ by an apostrophe alone.
    """
    return [_vqa(one, some) for one, some in zip(predictions, accepted, strict=True)]


def _vqa(prediction: str, answers: Answers) -> float:
    agree = [_spoken(answer) == _spoken(prediction) for answer in answers]
    if len(answers) < 4:
        return float(any(agree))
    return sum(min(1.0, (sum(agree) - one) / 3) for one in agree) / len(agree)


def _spoken(text: str) -> str:
    text = text.lower().replace("'", "").replace("’", "")
    text = re.sub(r"(?<=\d),(?=\d)", "", text)
    text = re.sub(r"\.(?!\d)", "", text).translate(_BLANKS)
    return " ".join(_NUMBERS.get(word, word) for word in text.split() if word not in _ARTICLES)


def anls(prediction: str, answer: str) -> float:
    """1 minus the edit distance over the longer length, 0 from a distance of one half on.

    Source: Biten et al., "Scene Text Visual Question Answering" (arXiv:1905.13648), eq. 1; case, and how wide blanks
    are, count for nothing. lmms-eval gives 0.5 at a distance of exactly one half, where the equation has 0, and counts
    blanks at the ends as length. Raises TokenPruneError without rapidfuzz.
    """
    try:
        from rapidfuzz.distance import Levenshtein
    except ImportError as error:
        raise TokenPruneError("--metric anls needs rapidfuzz: pip install tokenprune-bench") from error
    ours, theirs = (" ".join(text.lower().split()) for text in (prediction, answer))
    distance = Levenshtein.normalized_distance(ours, theirs)
    return 1 - distance if distance < 0.5 else 0.0


def relaxed(prediction: str, answer: str) -> float:
    """1 if two numbers differ by at most 5 % of the right one, or two texts are equal as in `exact`.

    Source: Masry et al., "ChartQA" (arXiv:2203.10244), section 5.1. A percent sign divides by 100.
    Differs from lmms-eval: "5,000" and "$5" are numbers, "0.0" is 0, and 1.05 is within 5 % of 1, whatever floats say.
    """
    ours, theirs = _number(prediction), _number(answer)
    if ours is None or theirs is None:
        return exact(prediction, answer)
    return float(abs(ours - theirs) <= 0.05 * abs(theirs) + 1e-12)


def _number(text: str) -> float | None:
    text = _plain(text).replace(",", "").lstrip("$€£")
    share = text.endswith("%")
    try:
        value = float(text.rstrip("% "))
    except ValueError:
        return None
    if not math.isfinite(value):
        return None
    return value / 100 if share else value


def f1(prediction: str, answer: str) -> float:
    """Harmonic mean of precision and recall of words, without articles and punctuation.

    Source: Rajpurkar et al., "SQuAD" (arXiv:1606.05250), section 6.1. Equal to `compute_f1` of transformers.
    """
    ours, theirs = _words(prediction), _words(answer)
    if not ours or not theirs:
        return float(ours == theirs)
    common = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * common / (len(ours) + len(theirs))


def _words(text: str) -> list[str]:
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return [word for word in text.split() if word not in _ARTICLES]


def cider(predictions: Sequence[str], accepted: Sequence[Answers]) -> list[float]:
    """CIDEr-D by pycocoevalcap; a word's weight comes from the accepted answers of all questions.

    Source: Vedantam et al., "CIDEr" (arXiv:1411.5726). Raises TokenPruneError where the package is missing.
    Differs from the paper's code: words are split at blanks after punctuation is dropped, not by the Java tokenizer. A
    word that is in the answers of every question weighs nothing: a single question scores 0 whatever is said.
    """
    try:
        from pycocoevalcap.cider.cider import Cider
    except ImportError as error:
        raise TokenPruneError("--metric cider needs pycocoevalcap: pip install pycocoevalcap") from error

    def split(text: str) -> str:
        return " ".join(text.lower().translate(str.maketrans("", "", string.punctuation)).split())

    gold = {number: [split(one) for one in some] for number, some in enumerate(accepted)}
    _, scores = Cider().compute_score(gold, {number: [split(one)] for number, one in enumerate(predictions)})
    return [float(score) for score in scores]


METRICS = {
    metric.name: metric
    for metric in (
        Metric("exact", "accuracy %", score_best(exact), graded=False),
        Metric("ending", "accuracy %", score_best(ending), graded=False),
        Metric("vqa", "VQA accuracy %", vqa),
        Metric("anls", "ANLS %", score_best(anls)),
        Metric("relaxed", "relaxed acc. %", score_best(relaxed), graded=False),
        Metric("f1", "F1 %", score_best(f1)),
        Metric("cider", "CIDEr ×100", cider, right=None),
    )
}


def get_metric(name: str) -> Metric:
    """Return a metric; raises OptionError for a name that is none, TokenPruneError where its package is missing."""
    if name not in METRICS:
        raise OptionError(f"there is no metric {name!r}: use one of {', '.join(METRICS)}")
    # What is missing is said before the work, not after it.
    METRICS[name].score(["a b"], [["a b"]])
    return METRICS[name]
