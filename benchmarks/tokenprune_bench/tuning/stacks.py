# SPDX-License-Identifier: Apache-2.0
"""Stacks of methods at different sites, put together from what each did alone; and what need not be asked at all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tokenprune.errors import OptionError
from tokenprune.selection.method import Method, Site
from tokenprune.selection.sites.pixels import ImageChooser
from tokenprune.settings import Setting
from tokenprune_bench.tuning.estimate import CHANCE, Estimate, select_promoted
from tokenprune_bench.tuning.trial import Trial

MAX_STACKS = 16  # stacks that are proposed
_OF_A_SITE = 4  # settings of one site that stacks are made of
_SITES = (Site.PRE_ENCODER, Site.IN_ENCODER, Site.PRE_LLM, Site.IN_LLM, Site.DECODE)


@dataclass(frozen=True)
class StackPart:
    """A setting of one method that has answered. drops: float `[questions]`, score lost on each. spent: share of the
    unpatched model's, of what is made small."""

    candidate: Setting
    drops: np.ndarray
    spent: float

    @classmethod
    def of(cls, trial: Trial, drops: np.ndarray, objective: str) -> StackPart:
        """Of a trial that has answered; what it spends is by the closed forms, where they tell."""
        share = trial.get_expected_share(objective)
        return cls(trial.candidate, drops, trial.get_price(objective)[0] if share is None else share)

    @property
    def drop(self) -> float:
        return max(0.0, float(self.drops.mean()))


def find_sites(candidates: Iterable[Setting]) -> set[Site]:
    """Return the sites of those that a stack can be made of."""
    return {site for candidate in candidates if (site := get_site(candidate)) is not None}


def get_site(candidate: Setting) -> Site | None:
    """Return where a setting of one method acts; None if it is a stack already, or nothing to stack."""
    methods: list[Method] = candidate.methods
    one = len(methods) == 1 and not isinstance(methods[0], ImageChooser) and methods[0].site in _SITES
    return methods[0].site if one else None


def explain_skip(trial: Trial, trials: Sequence[Trial], objective: str, enough: int) -> str | None:
    """Return why a trial is not asked: `enough` others are expected to spend less, and lost nothing so far; None if it
    is to be asked, or if the closed forms do not tell what it spends.

    The mildest setting of a method is asked in any case: a search that ends with gambles alone promises nothing.
    """
    share = trial.get_expected_share(objective)
    if share is None:
        return None
    same = [one.get_expected_share(objective) or 0.0 for one in trials if one.candidate.name == trial.candidate.name]
    if get_site(trial.candidate) is not None and share >= max(same):
        return None
    heard = [one for one in trials if one.search and not one.state and one.drop <= 0]
    cheaper = sum((one.get_expected_share(objective) or 0.0) < share for one in heard)
    return f"not asked: {cheaper} that spend less, by the closed forms, lost nothing" if cheaper >= enough else None


def propose_stacks(
    answered: Sequence[StackPart],
    spent: Callable[[Setting], float | None],
    estimate: Callable[[np.ndarray, float], Estimate],
    most: int = MAX_STACKS,
) -> list[Setting]:
    """Return stacks of two sites and more that are worth asking, at most `most`.

    Of each site those settings are stacked that are on its front: no other there spends less and loses less. What a
    stack loses is taken to be what its parts lose, question by question. spent: what the closed forms say that a
    candidate spends, as a share; None where they say nothing, and then what its parts spend is multiplied. estimate: of
    drops and a saving, what to expect. A stack is left out where a setting alone loses no more and spends no more, or
    where it has hardly a chance to pass the test.
    """
    fronts = {site: _front([one for one in answered if get_site(one.candidate) is site]) for site in _SITES}
    choices = [[None, *front] for front in fronts.values() if front]
    found: list[tuple[Setting, Estimate]] = []
    for combination in itertools.product(*choices):
        parts = [one for one in combination if one is not None]
        if len(parts) < 2:
            continue
        candidate = _stacked(parts)
        if candidate is None:
            continue
        drops = np.clip(sum(one.drops for one in parts), -1, 1)
        share = spent(candidate)
        if share is None:
            share = float(np.prod([one.spent for one in parts]))
        if any(one.spent <= share and one.drop <= max(0.0, float(drops.mean())) for one in answered):
            continue
        expected = estimate(drops, 1 - share)
        if expected.chance >= CHANCE:
            found.append((candidate, expected))
    return [found[index][0] for index in select_promoted([one for _, one in found], most)]


def _front(alone: Sequence[StackPart]) -> list[StackPart]:
    """Return up to `_OF_A_SITE` settings that no other beats at both, spread from the safest to the cheapest."""
    best: list[StackPart] = []
    for one in sorted(alone, key=lambda one: (one.drop, one.spent)):
        if not best or one.spent < best[-1].spent:
            best.append(one)
    if len(best) <= _OF_A_SITE:
        return best
    return [best[round(place)] for place in np.linspace(0, len(best) - 1, _OF_A_SITE)]


def _stacked(parts: Sequence[StackPart]) -> Setting | None:
    """Return a candidate of the methods of several, in the order of their sites; None if they are in each other's
    way."""
    names, options, keeps = [], [], []
    for one in parts:
        names += one.candidate.names
        options += one.candidate.options
        keeps.append(one.candidate.methods[0].default_keep if one.candidate.keep is None else one.candidate.keep)
    stack = Setting(tuple(names), tuple(options), keeps)
    try:
        return stack.validate()
    except OptionError:
        return None


__all__ = ["MAX_STACKS", "StackPart", "explain_skip", "find_sites", "get_site", "propose_stacks"]
