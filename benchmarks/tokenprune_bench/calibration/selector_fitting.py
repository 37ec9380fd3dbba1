# SPDX-License-Identifier: Apache-2.0
"""Fit the scoring head of `learned` to a frozen model and its own answers, without labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

from tokenprune.api import is_patched
from tokenprune.errors import AlreadyPatchedError, BudgetError, OptionError
from tokenprune.selection.files import check_output
from tokenprune_bench.calibration.selector_observations import ObservedPrompts
from tokenprune_bench.calibration.selector_training import FittedSelector, SelectorTraining, Target


def fit_learned(
    model: Any,
    samples: Iterable[dict[str, Any]] | ObservedPrompts,
    out: str | Path | None = None,
    *,
    keep: float | Sequence[float] = (0.25, 0.11),
    target: Target = "attention",
    use_question: bool = False,
    minutes: float = 60.0,
    epochs: int = 12,
    seed: int = 0,
    max_new_tokens: int = 24,
    restart: bool = False,
    progress: Callable[[int], None] | None = None,
) -> FittedSelector:
    """Fit the scoring head of `learned` to answers of the frozen model, without labels.

    The model first answers each prompt unpruned, which takes most of the time. If the samples do not end within most
    of `minutes`, the head is fitted to the samples so far. The same call continues an unfinished run.

    Args:
        model: An unpatched model.
        samples: Model arguments of prompts with images, one prompt each, or observations of an earlier fit.
        out: File to write. Beside it an unfinished run stores its state (`.partial`) and the observed samples
            (`.observed`, the features of the images in float16).
        keep: One share in (0, 1), or several. The result states the importance of the tokens with the highest scores
            at each. "topk" draws one of them for each step.
        target: Importance that the head learns: "attention" of the answer to each visual token, "gradient" of the
            answer's loss with respect to the token's gate, or "topk", the loss under random soft gates. On
            held-out questions of other kinds than the samples, "topk" loses most (docs/results/methods.md).
        use_question: Let the head read the mean embedding of the question. vLLM does not serve such a head.
        minutes: Time limit. The fit is deterministic if it ends before.
        epochs: Passes over the samples.
        seed: Seed of the weights, the order of the samples and the gates.
        max_new_tokens: Maximum length of an answer.
        restart: Ignore an unfinished run.
        progress: Called with the number of finished samples.

    Returns:
        The fitted head and the statistics of the fit.

    Raises:
        AlreadyPatchedError: If the model is patched.
        BudgetError: If a share is not in (0, 1).
        OptionError: If an option is not valid, or a file belongs to another fit.
        TokenPruneError: If no sample has an image.

    Examples:
        >>> fitted = fit_learned(model, [inputs], epochs=1)
        >>> fitted.selector.uses_question
        False
    """
    if is_patched(model):
        raise AlreadyPatchedError("The model is patched. Call tokenprune.unpatch(model) before fitting.")
    keeps = _check_keeps(keep)
    _check_options(target, minutes, epochs, max_new_tokens)
    path = None if out is None else Path(out)
    check_output(path)
    if isinstance(samples, ObservedPrompts):
        observations = samples
    else:
        arguments: Any = samples if hasattr(samples, "__getitem__") else list(samples)
        folder = None if path is None else path.with_name(f"{path.name}.observed")
        observations = ObservedPrompts(model, arguments, max_new_tokens, folder, target != "attention")
    training = SelectorTraining(observations, keeps, target, use_question, seed, path)
    return training.run(minutes, epochs, restart, progress)


def _check_keeps(keep: Any) -> list[float]:
    keeps = list(keep) if isinstance(keep, (list, tuple)) else [keep]
    for share in keeps:
        if not isinstance(share, float) or not 0 < share < 1:
            raise BudgetError(f"keep={share!r} cannot be fitted. Pass a share between 0 and 1, such as 0.25.")
    if not keeps:
        raise BudgetError("keep is empty. Pass at least one share, such as 0.25.")
    return keeps


def _check_options(target: Any, minutes: Any, epochs: Any, max_new_tokens: Any) -> None:
    if target not in get_args(Target):
        raise OptionError(f"target={target!r} is not valid. Use one of {', '.join(get_args(Target))}.")
    if isinstance(minutes, bool) or not isinstance(minutes, (int, float)) or not 0 < minutes < math.inf:
        raise OptionError(f"minutes={minutes!r} is not valid. Pass a positive number.")
    for name, value in (("epochs", epochs), ("max_new_tokens", max_new_tokens)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(f"{name}={value!r} is not valid. Pass a positive integer.")
