# SPDX-License-Identifier: Apache-2.0
"""Metrics of answers, with their sources. Scores are in [0, 1], CIDEr scores in [0, 10]."""

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

    Attributes:
        name: Name on the command line.
        title: Title in tables.
        score: Maps all predictions and the accepted answers of each question to one score per question.
        graded: Whether there are scores between right and wrong.
        right: Minimum score of a right answer in McNemar's test and in the hard split. None if there is no such score.
    """

    name: str
    title: str
    score: Callable[[Sequence[str], Sequence[Answers]], list[float]]
    graded: bool = True
    right: float | None = 0.5


def score_best(score: Callable[[str, str], float]) -> Callable[[Sequence[str], Sequence[Answers]], list[float]]:
    """Turn a score against one answer into the best score over all accepted answers."""

    def scores(predictions: Sequence[str], accepted: Sequence[Answers]) -> list[float]:
        return [
            max(score(prediction, answer) for answer in answers)
            for prediction, answers in zip(predictions, accepted, strict=True)
        ]

    return scores


def exact(prediction: str, answer: str) -> float:
    """Return 1 if the texts are equal, ignoring case, outer blanks and final full stops."""
    return float(_plain(prediction) == _plain(answer))


def ending(prediction: str, answer: str) -> float:
    """Return 1 if a sentence ends with the answer, compared as in `exact`: "the star is red" for "red"."""
    ours, theirs = _plain(prediction), _plain(answer)
    return float(ours == theirs or ours.endswith(f" {theirs}"))


def _plain(text: str) -> str:
    return text.strip().rstrip(".").strip().lower()


def vqa(predictions: Sequence[str], accepted: Sequence[Answers]) -> list[float]:
    """Return VQA accuracy: the mean of min(1, agreeing people / 3) over all subsets that leave one person out.

    Source:
        Antol et al., "VQA" (arXiv 1505.00468), section 3.2, and the text rules of the evaluation: punctuation is
        removed (except # $ % & * : ^ | ~ and decimal points), articles are removed, and numerals replace number words.

    Differences from the paper:
        - Apostrophes are removed on both sides, instead of a table of contractions, so "its" equals "it's".
        - With fewer than four answers, one that agrees is enough; the formula could never reach 1.
        - On 20,000 random answers, lmms-eval's TextVQA accuracy differs only for words with apostrophes.
    """
    return [_compute_vqa(prediction, answers) for prediction, answers in zip(predictions, accepted, strict=True)]


def _compute_vqa(prediction: str, answers: Answers) -> float:
    agree = [_normalize_vqa_text(answer) == _normalize_vqa_text(prediction) for answer in answers]
    if len(answers) < 4:
        return float(any(agree))
    return sum(min(1.0, (sum(agree) - agrees) / 3) for agrees in agree) / len(agree)


def _normalize_vqa_text(text: str) -> str:
    text = text.lower().replace("'", "").replace("’", "")
    text = re.sub(r"(?<=\d),(?=\d)", "", text)
    text = re.sub(r"\.(?!\d)", "", text).translate(_BLANKS)
    return " ".join(_NUMBERS.get(word, word) for word in text.split() if word not in _ARTICLES)


def anls(prediction: str, answer: str) -> float:
    """Return 1 minus the edit distance over the longer length, or 0 for distances of at least one half.

    Raises:
        TokenPruneError: If rapidfuzz is not installed.

    Source:
        Biten et al., "Scene Text Visual Question Answering" (arXiv 1905.13648), eq. 1. Case and the width of blanks are
        ignored. lmms-eval returns 0.5 at a distance of one half, and counts outer blanks.
    """
    try:
        from rapidfuzz.distance import Levenshtein
    except ImportError as error:
        raise TokenPruneError("--metric anls needs rapidfuzz: pip install tokenprune-bench") from error
    ours, theirs = (" ".join(text.lower().split()) for text in (prediction, answer))
    distance = Levenshtein.normalized_distance(ours, theirs)
    return 1 - distance if distance < 0.5 else 0.0


def relaxed(prediction: str, answer: str) -> float:
    """Return 1 if two numbers differ by at most 5 % of the right number, or if two texts are equal as in `exact`.

    Source:
        Masry et al., "ChartQA" (arXiv 2203.10244), section 5.1. A percent sign divides by 100.

    Differences from the paper:
        - Unlike in lmms-eval, "5,000" and "$5" are numbers, "0.0" is 0, and 1.05 is within 5 % of 1 despite rounding.
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
    """Return the harmonic mean of precision and recall of words, without articles and punctuation.

    Source:
        Rajpurkar et al., "SQuAD" (arXiv 1606.05250), section 6.1. Equal to `compute_f1` of transformers.
    """
    ours, theirs = _split_words(prediction), _split_words(answer)
    if not ours or not theirs:
        return float(ours == theirs)
    common = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * common / (len(ours) + len(theirs))


def _split_words(text: str) -> list[str]:
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return [word for word in text.split() if word not in _ARTICLES]


def cider(predictions: Sequence[str], accepted: Sequence[Answers]) -> list[float]:
    """Return CIDEr-D scores of pycocoevalcap. Word weights come from the accepted answers of all questions.

    Raises:
        TokenPruneError: If pycocoevalcap is not installed.

    Source:
        Vedantam et al., "CIDEr" (arXiv 1411.5726).

    Differences from the paper:
        - Words are split at blanks after punctuation is removed, instead of with the Java tokenizer.
        - A word in the answers of every question has zero weight, so a single question always scores 0.
    """
    try:
        from pycocoevalcap.cider.cider import Cider
    except ImportError as error:
        raise TokenPruneError("--metric cider needs pycocoevalcap: pip install pycocoevalcap") from error

    def split(text: str) -> str:
        return " ".join(text.lower().translate(str.maketrans("", "", string.punctuation)).split())

    gold = {index: [split(text) for text in answers] for index, answers in enumerate(accepted)}
    _, scores = Cider().compute_score(gold, {index: [split(text)] for index, text in enumerate(predictions)})
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
    """Return a metric by name.

    Raises:
        OptionError: If the metric does not exist.
        TokenPruneError: If its package is not installed.
    """
    if name not in METRICS:
        raise OptionError(f"Metric {name!r} is not known. Use one of {', '.join(METRICS)}.")
    # A trial score raises early if a package is missing.
    METRICS[name].score(["a b"], [["a b"]])
    return METRICS[name]
