# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Lt

from tokenprune.errors import OptionError
from tokenprune.methods.registry import register
from tokenprune.selection.method import Site
from tokenprune.selection.sites.pixels import ImageChooser

_FRONT, _BACK, _LEFT, _RIGHT = ("front", "forward", "ahead"), ("back", "rear", "behind"), ("left",), ("right",)
_DIRECTIONS = {word: group for group in (_FRONT, _BACK, _LEFT, _RIGHT) for word in group}
_NOUN = r"(?:image|picture|photo|view|camera|cam)s?"
_ORDINALS = {
    word: number
    for number, words in enumerate(
        ("first 1st", "second 2nd", "third 3rd", "fourth 4th", "fifth 5th", "sixth 6th", "seventh 7th", "eighth 8th"), 1
    )
    for word in words.split()
} | {"last": -1}
_ORDINAL, _JOIN = "|".join(_ORDINALS), r"(?:\s*,?\s+(?:and|or)\s+|\s*,\s*)"
_NUMBERED = re.compile(rf"\b{_NOUN} #?(\d+(?:{_JOIN}#?\d+)*)\b")
_COUNTED = re.compile(rf"\b((?:{_ORDINAL})(?:{_JOIN}(?:the )?(?:{_ORDINAL}))*) {_NOUN}\b")
# A question with one of these may be about views that it does not name.
_OPEN = re.compile(
    rf"\b(?:all|every|each|both|another|others?|rest|remaining|except|besides|(?:which|what|any) {_NOUN})\b"
)


@register("view_select", site=Site.PRE_ENCODER, paper="none (idea of LiteVLM, arXiv 2506.07416)")
@dataclass(frozen=True)
class ViewSelect(ImageChooser):
    """Encode only those of a prompt's images that the question names, such as "front left" of six camera views.

    A question that names no view gets all of them. So does one that says "all", "each", "other", "except", "which
    camera" and the like. The question is the text after the last image.

    views:       names of a prompt's images, in their order ("front", "CAM_FRONT_LEFT", "rear right", "map"). Words
                 for directions have synonyms (ahead, forward; rear, after) and come in any order; the longest name
                 wins. Whether given or not, "image 2", "pictures 1 and 3", "the second photo", "the last view" count.
    always_keep: names out of `views` that are never left out.
    scorer:      a function (question, names) -> one number for each view, positive for those that matter, for
                 questions that name no view (a trained head, `similarity`).
    weight:      of the scorer's numbers; being named counts +1, not being named where another view is, -1.

    `keep` is an upper bound on the images of a prompt (a share, rounded down, or a number), and 1.0, the default,
    means no bound: this method may leave out images at keep=1.0. Where the bound binds, higher scores win, then
    earlier images; `always_keep` and one image stay in any case. A prompt with one image is left alone.

    Source: LiteVLM, arXiv 2506.07416, whose patch selection module scores camera views by the question alone, adds a
    lexical score, and drops views below a threshold before the encoder.

    Differs from the paper: there is no public code and its text could not be read; this is a reconstruction of the
    idea. The paper trains a module on the query's tokens; here there is none, `scorer` takes its place. Names, words
    and weights are our decision. Tiles of one image (LLaVA-NeXT, InternVL) are not chosen: to score a tile by the
    question before it is encoded takes an image tower and a text tower trained together, which a VLM does not have.
    """

    query_aware: ClassVar[bool] = True

    views: Sequence[str] = ()
    always_keep: Sequence[str] = ()
    scorer: Callable[[str, list[str]], Any] | None = None
    weight: Annotated[float, Ge(0), Lt(math.inf)] = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check(all(view.strip() for view in self.views), f"views={list(self.views)}: a view needs a name")
        said = [list_phrases(view) for view in self.views]
        for (a, one), (b, other) in itertools.combinations(zip(self.views, said, strict=True), 2):
            self._check(not one & other, f"the views {a!r} and {b!r} have the same name")
        for name in self.always_keep:
            self._check(name in self.views, f"always_keep names {name!r}, which is none of views={list(self.views)}")

    def choose(self, question: str, count: int, most: int) -> list[int]:
        if count <= 1:
            return list(range(count))
        if self.views and count != len(self.views):
            raise OptionError(
                f"{self.name}: a prompt has {count} images, and views= names {len(self.views)}: give a name for each "
                "image of a prompt"
            )
        names = list(self.views) or [f"image {number}" for number in range(1, count + 1)]
        found = find_named_views(question, names, match_names=bool(self.views))
        if not found and self.scorer is None:
            score = [0.0] * count
            wanted = set(range(count))
        else:
            lexical = [(1.0 if view in found else -1.0) if found else 0.0 for view in range(count)]
            score = [a + self.weight * b for a, b in zip(lexical, self._scores(question, names), strict=True)]
            wanted = {view for view in range(count) if score[view] > 0}
        always = {names.index(name) for name in self.always_keep}
        order = sorted(range(count), key=lambda view: (view not in always, -score[view], view))
        if not wanted | always:
            wanted = {order[0]}
        return sorted(view for place, view in enumerate(order) if view in always or (view in wanted and place < most))

    def _scores(self, question: str, names: list[str]) -> list[float]:
        if self.scorer is None:
            return [0.0] * len(names)
        scores = [float(score) for score in self.scorer(question, names)]
        if len(scores) != len(names) or not all(map(math.isfinite, scores)):
            raise OptionError(f"{self.name}: the scorer gave {scores} for the {len(names)} views {names}")
        return scores


def list_phrases(view: str) -> set[str]:
    """Return all ways to say a view's name, in lower case."""
    words = re.findall(r"[^\W_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", view).lower())
    bare = [word for word in words if not re.fullmatch(_NOUN, word)]
    if any(not word.isdigit() for word in bare):  # of "camera 2", "2" alone would be found everywhere
        words = bare
    if not all(word in _DIRECTIONS for word in words):
        return {" ".join(words)}
    ways = itertools.product(*(_DIRECTIONS[word] for word in words))
    return {" ".join(order) for way in ways for order in itertools.permutations(way)}


def find_named_views(question: str, views: Sequence[str], match_names: bool = True) -> set[int]:
    """Return which views a question names, by name or by number; none where it asks about others too."""
    text = re.sub(r"[-_\s]+", " ", question.lower())
    if _OPEN.search(text):
        return set()
    found: set[int] = set()

    def note(numbers: Sequence[int]) -> str:
        found.update(number - 1 if number > 0 else len(views) + number for number in numbers if number <= len(views))
        return " . "

    text = _NUMBERED.sub(lambda match: note([int(n) for n in re.findall(r"\d+", match[1]) if int(n)]), text)
    text = _COUNTED.sub(lambda match: note([_ORDINALS[one] for one in re.findall(_ORDINAL, match[1])]), text)
    if match_names:
        owner = {phrase: view for view, name in enumerate(views) for phrase in list_phrases(name)}
        longest_first = "|".join(re.escape(phrase) for phrase in sorted(owner, key=len, reverse=True))
        pattern = re.compile(rf"(?<!\w)(?:{longest_first})(?!\w)")
        said = {owner[phrase] for phrase in pattern.findall(text)}
        found |= said
        if said:
            # "front left and right": a direction that is no view of its own adds the views that contain it.
            left = {w for word in re.findall(r"\w+", pattern.sub(" ", text)) for w in _DIRECTIONS.get(word, ())}
            found.update(v for phrase, v in owner.items() if left & set(phrase.split()) and " " in phrase)
    return found


def build_similarity_scorer(encode: Callable[[list[str]], torch.Tensor]) -> Callable[[str, list[str]], list[float]]:
    """Return a `scorer` that compares a question with names by a text encoder of yours.

    encode: a list of texts -> float `[texts, dim]`, for example the text tower of a CLIP model. A view's score is
    2 sigmoid(8 (cos - mean of the views' cos)) - 1 (our decision).
    """

    def score(question: str, names: list[str]) -> list[float]:
        features = torch.nn.functional.normalize(encode([question, *names]).float(), dim=-1)
        cosine = features[1:] @ features[0]
        return (2 * torch.sigmoid(8 * (cosine - cosine.mean())) - 1).tolist()

    return score
