# SPDX-License-Identifier: Apache-2.0
"""Stacks of methods at different sites, built from the results of their parts, and trials that can be skipped."""

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

MAX_STACKS = 16  # proposed stacks
_OF_A_SITE = 4  # settings per site that stacks may use
_SITES = (Site.PRE_ENCODER, Site.IN_ENCODER, Site.PRE_LLM, Site.IN_LLM, Site.DECODE)


@dataclass(frozen=True)
class StackPart:
    """A setting of one method with answers.

    Attributes:
        candidate: The setting.
        drops: Score lost per question, float, shape (questions,).
        spent: Share of the unpatched cost, for the objective of the search.
    """

    candidate: Setting
    drops: np.ndarray
    spent: float

    @classmethod
    def from_trial(cls, trial: Trial, drops: np.ndarray, objective: str) -> StackPart:
        """Build a part from an answered trial. The predicted cost is used if it is known."""
        share = trial.get_expected_share(objective)
        return cls(trial.candidate, drops, trial.get_price(objective)[0] if share is None else share)

    @property
    def drop(self) -> float:
        """Mean drop, not below zero."""
        return max(0.0, float(self.drops.mean()))


def find_sites(candidates: Iterable[Setting]) -> set[Site]:
    """Return the sites of all candidates that a stack can contain."""
    return {site for candidate in candidates if (site := get_site(candidate)) is not None}


def get_site(candidate: Setting) -> Site | None:
    """Return the site of a single-method setting, or None for stacks and methods that cannot be stacked."""
    methods: list[Method] = candidate.methods
    is_single = len(methods) == 1 and not isinstance(methods[0], ImageChooser) and methods[0].site in _SITES
    return methods[0].site if is_single else None


def explain_skip(trial: Trial, trials: Sequence[Trial], objective: str, enough: int) -> str | None:
    """Return why a trial need not be asked, or None.

    A trial is skipped if `enough` other trials are predicted to cost less and lost no score so far. The mildest setting
    of each method is never skipped: a search with only aggressive settings at the end promises nothing.
    """
    share = trial.get_expected_share(objective)
    if share is None:
        return None
    shares = [
        other.get_expected_share(objective) or 0.0 for other in trials if other.candidate.name == trial.candidate.name
    ]
    if get_site(trial.candidate) is not None and share >= max(shares):
        return None
    heard = [other for other in trials if other.search and not other.state and other.drop <= 0]
    cheaper = sum((other.get_expected_share(objective) or 0.0) < share for other in heard)
    return f"not asked: {cheaper} cheaper settings (predicted) lost no score" if cheaper >= enough else None


def propose_stacks(
    answered: Sequence[StackPart],
    spent: Callable[[Setting], float | None],
    estimate: Callable[[np.ndarray, float], Estimate],
    max_stacks: int = MAX_STACKS,
) -> list[Setting]:
    """Propose stacks of two or more sites that are worth asking.

    Each stack takes at most one setting per site, from the site's Pareto front of cost and drop. Its drop on a question
    is predicted as the sum of the drops of its parts. A stack is left out if a single setting has neither a larger drop
    nor a larger cost, or if its chance to pass the test is below `CHANCE`.

    Args:
        answered: Single-method settings with answers.
        spent: Returns the predicted cost share of a candidate. If it returns None, the shares of the parts are
            multiplied.
        estimate: Returns the estimate for given drops and a saving.
        max_stacks: Maximum number of stacks.
    """
    fronts = {site: _select_front([part for part in answered if get_site(part.candidate) is site]) for site in _SITES}
    choices = [[None, *front] for front in fronts.values() if front]
    stacks: list[tuple[Setting, Estimate]] = []
    for combination in itertools.product(*choices):
        parts = [part for part in combination if part is not None]
        if len(parts) < 2:
            continue
        candidate = _combine_parts(parts)
        if candidate is None:
            continue
        drops = np.clip(sum(part.drops for part in parts), -1, 1)
        share = spent(candidate)
        if share is None:
            share = float(np.prod([part.spent for part in parts]))
        if any(part.spent <= share and part.drop <= max(0.0, float(drops.mean())) for part in answered):
            continue
        expected = estimate(drops, 1 - share)
        if expected.chance >= CHANCE:
            stacks.append((candidate, expected))
    return [stacks[index][0] for index in select_promoted([part for _, part in stacks], max_stacks)]


def _select_front(parts: Sequence[StackPart]) -> list[StackPart]:
    """Return up to `_OF_A_SITE` parts on the Pareto front of cost and drop of one site, the safest first."""
    best: list[StackPart] = []
    for part in sorted(parts, key=lambda part: (part.drop, part.spent)):
        if not best or part.spent < best[-1].spent:
            best.append(part)
    if len(best) <= _OF_A_SITE:
        return best
    return [best[round(position)] for position in np.linspace(0, len(best) - 1, _OF_A_SITE)]


def _combine_parts(parts: Sequence[StackPart]) -> Setting | None:
    """Combine parts in the order of their sites. None if the methods cannot be combined."""
    names, options, keeps = [], [], []
    for part in parts:
        names += part.candidate.names
        options += part.candidate.options
        keeps.append(part.candidate.methods[0].default_keep if part.candidate.keep is None else part.candidate.keep)
    stack = Setting(tuple(names), tuple(options), keeps)
    try:
        return stack.validate()
    except OptionError:
        return None


__all__ = ["MAX_STACKS", "StackPart", "explain_skip", "find_sites", "get_site", "propose_stacks"]
