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
    word: ordinal
    for ordinal, words in enumerate(
        ("first 1st", "second 2nd", "third 3rd", "fourth 4th", "fifth 5th", "sixth 6th", "seventh 7th", "eighth 8th"), 1
    )
    for word in words.split()
} | {"last": -1}
_ORDINAL, _JOIN = "|".join(_ORDINALS), r"(?:\s*,?\s+(?:and|or)\s+|\s*,\s*)"
_NUMBERED = re.compile(rf"\b{_NOUN} #?(\d+(?:{_JOIN}#?\d+)*)\b")
_COUNTED = re.compile(rf"\b((?:{_ORDINAL})(?:{_JOIN}(?:the )?(?:{_ORDINAL}))*) {_NOUN}\b")
# A question with one of these words may ask about views that it does not name.
_OPEN = re.compile(
    rf"\b(?:all|every|each|both|another|others?|rest|remaining|except|besides|(?:which|what|any) {_NOUN})\b"
)


@register("view_select", site=Site.PRE_ENCODER, paper="none (idea of LiteVLM, arXiv 2506.07416)")
@dataclass(frozen=True)
class ViewSelect(ImageChooser):
    """Encode only the images of a prompt that the question names.

    For example, a question about "front left" selects one of six camera views. The question is the text after the last
    image. A question that names no view, or contains "all", "each", "other", "except", "which camera" and similar
    words, selects all views. Independently of `views`, "image 2", "pictures 1 and 3", "the second photo" and "the last
    view" count.

    `keep` is an upper bound on the images of a prompt: a share, rounded down, or a number. The default 1.0 sets no
    bound, so images may be dropped at keep=1.0. If the bound is exceeded, higher scores win, then earlier images.
    `always_keep` and at least one image are kept. A prompt with one image is unchanged.

    Args:
        views: Names of the prompt's images in order, such as "front", "CAM_FRONT_LEFT", "rear right" or "map".
            Direction words have synonyms (ahead, forward; rear, behind) and any order. The longest name wins.
        always_keep: Names from `views` that are always kept.
        scorer: Function of (question, names) that returns one number per view, positive for relevant views. For
            questions that name no view: a trained head, or `build_similarity_scorer`.
        weight: Weight of the scorer's numbers. Being named counts +1, and -1 if only other views are named.

    Source:
        LiteVLM (arXiv 2506.07416), which scores camera views by the question only, adds a lexical score, and drops
        views below a threshold before the encoder. Reconstruction: no code is public and the paper's text was not
        available.

    Differences from the paper:
        - The paper trains a module on the query's tokens. Here `scorer` replaces it.
        - Names, words and weights are choices of this implementation.
        - Tiles of one image (LLaVA-NeXT, InternVL) are not selected. Scoring a tile before encoding requires image and
          text towers that were trained together, which a VLM lacks.

    Examples:
        >>> ViewSelect(views=("front", "rear left")).choose("What is at the rear left?", 2, 2)
        [1]
    """

    query_aware: ClassVar[bool] = True

    views: Sequence[str] = ()
    always_keep: Sequence[str] = ()
    scorer: Callable[[str, list[str]], Any] | None = None
    weight: Annotated[float, Ge(0), Lt(math.inf)] = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check(all(view.strip() for view in self.views), f"views={list(self.views)} contains an empty name")
        phrases = [list_phrases(view) for view in self.views]
        for (a, first), (b, second) in itertools.combinations(zip(self.views, phrases, strict=True), 2):
            self._check(not first & second, f"the views {a!r} and {b!r} have the same name")
        for name in self.always_keep:
            self._check(name in self.views, f"always_keep={name!r} is not in views={list(self.views)}")

    def choose(self, question: str, count: int, max_images: int) -> list[int]:
        if count <= 1:
            return list(range(count))
        if self.views and count != len(self.views):
            raise OptionError(
                f"{self.name}: the prompt has {count} images, but views has {len(self.views)} names. Pass one name per "
                "image."
            )
        names = list(self.views) or [f"image {index}" for index in range(1, count + 1)]
        named = find_named_views(question, names, match_names=bool(self.views))
        if not named and self.scorer is None:
            score = [0.0] * count
            selected = set(range(count))
        else:
            lexical = [(1.0 if view in named else -1.0) if named else 0.0 for view in range(count)]
            score = [a + self.weight * b for a, b in zip(lexical, self._compute_scores(question, names), strict=True)]
            selected = {view for view in range(count) if score[view] > 0}
        always = {names.index(name) for name in self.always_keep}
        order = sorted(range(count), key=lambda view: (view not in always, -score[view], view))
        if not selected | always:
            selected = {order[0]}
        return sorted(
            view for rank, view in enumerate(order) if view in always or (view in selected and rank < max_images)
        )

    def _compute_scores(self, question: str, names: list[str]) -> list[float]:
        if self.scorer is None:
            return [0.0] * len(names)
        scores = [float(score) for score in self.scorer(question, names)]
        if len(scores) != len(names) or not all(map(math.isfinite, scores)):
            raise OptionError(f"{self.name}: scorer returned {scores}. Return one finite number per view {names}.")
        return scores


def list_phrases(view: str) -> set[str]:
    """Return all lower-case phrases for the name of a view.

    Examples:
        >>> sorted(list_phrases("CAM_LEFT"))
        ['left']
    """
    words = re.findall(r"[^\W_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", view).lower())
    bare = [word for word in words if not re.fullmatch(_NOUN, word)]
    if any(not word.isdigit() for word in bare):  # keep "camera" in "camera 2": a plain "2" would match everywhere
        words = bare
    if not all(word in _DIRECTIONS for word in words):
        return {" ".join(words)}
    ways = itertools.product(*(_DIRECTIONS[word] for word in words))
    return {" ".join(order) for way in ways for order in itertools.permutations(way)}


def find_named_views(question: str, views: Sequence[str], match_names: bool = True) -> set[int]:
    """Return the indices of the views that a question names by name or number; empty if it asks about other views too.

    Examples:
        >>> find_named_views("What is in front?", ["front", "rear"])
        {0}
    """
    text = re.sub(r"[-_\s]+", " ", question.lower())
    if _OPEN.search(text):
        return set()
    named: set[int] = set()

    def add_views(numbers: Sequence[int]) -> str:
        named.update(
            ordinal - 1 if ordinal > 0 else len(views) + ordinal for ordinal in numbers if ordinal <= len(views)
        )
        return " . "

    text = _NUMBERED.sub(lambda match: add_views([int(n) for n in re.findall(r"\d+", match[1]) if int(n)]), text)
    text = _COUNTED.sub(lambda match: add_views([_ORDINALS[word] for word in re.findall(_ORDINAL, match[1])]), text)
    if match_names:
        owner = {phrase: view for view, name in enumerate(views) for phrase in list_phrases(name)}
        longest_first = "|".join(re.escape(phrase) for phrase in sorted(owner, key=len, reverse=True))
        pattern = re.compile(rf"(?<!\w)(?:{longest_first})(?!\w)")
        matched = {owner[phrase] for phrase in pattern.findall(text)}
        named |= matched
        if matched:
            # "front left and right": a remaining direction adds the views with names that contain it.
            directions = {w for word in re.findall(r"\w+", pattern.sub(" ", text)) for w in _DIRECTIONS.get(word, ())}
            named.update(v for phrase, v in owner.items() if directions & set(phrase.split()) and " " in phrase)
    return named


def build_similarity_scorer(encode: Callable[[list[str]], torch.Tensor]) -> Callable[[str, list[str]], list[float]]:
    """Return a `scorer` for `ViewSelect` that compares the question with the names by a text encoder.

    The score of a view is 2 sigmoid(8 (cos - mean cos of all views)) - 1.

    Args:
        encode: Function from a list of texts to vectors (texts, channels), such as the text tower of a CLIP model.

    Examples:
        >>> scorer = build_similarity_scorer(lambda texts: torch.eye(3))
        >>> scorer("Is the road clear?", ["front", "rear"])
        [0.0, 0.0]
    """

    def score(question: str, names: list[str]) -> list[float]:
        features = torch.nn.functional.normalize(encode([question, *names]).float(), dim=-1)
        cosine = features[1:] @ features[0]
        return (2 * torch.sigmoid(8 * (cosine - cosine.mean())) - 1).tolist()

    return score
