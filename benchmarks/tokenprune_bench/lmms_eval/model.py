# SPDX-License-Identifier: Apache-2.0
"""The model class of lmms-eval: a base model with a patch and measurements."""

from __future__ import annotations

import difflib
import inspect
from typing import Any

from lmms_eval.api.model import lmms
from lmms_eval.models import MODEL_REGISTRY_V2
from lmms_eval.models.model_utils.gen_metrics import get_logged_metrics_history, log_metrics
from lmms_eval.utils import simple_parse_args_string
from loguru import logger
from torch import nn

import tokenprune
from tokenprune.errors import OptionError, TokenPruneError, UnsupportedModelError
from tokenprune.integrations.hf.families import get_adapter
from tokenprune_bench.lmms_eval.arguments import ModelArguments, parse_arguments
from tokenprune_bench.lmms_eval.bases import BASES, TESTED
from tokenprune_bench.lmms_eval.measure import Tally, measure_calls

_WORK = "See docs/measure/lmms-eval.md for the supported bases."


class Measured:
    """Mixin for a model of lmms-eval that measures all answers. The sums are in `throughput` of the results."""

    _shares = True  # see Tally.to_metrics

    def generate_until(self, requests: list[Any]) -> list[Any]:
        return self._measured("generate_until", requests)

    def generate_until_multi_round(self, requests: list[Any]) -> list[Any]:
        return self._measured("generate_until_multi_round", requests)

    def _measured(self, kind: str, requests: list[Any]) -> list[Any]:
        answers: list[Any] = [None] * len(requests)
        indices_by_task: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            indices_by_task.setdefault(request.task_name, []).append(index)
        logged = len(get_logged_metrics_history())
        tallies: dict[str, Tally] = {}
        for task, indices in indices_by_task.items():
            with measure_calls(self.model) as tally:
                task_answers = getattr(super(), kind)([requests[index] for index in indices])
            tallies[task] = tally
            for index, answer in zip(indices, task_answers, strict=True):
                answers[index] = answer
        self._log(tallies, timed=len(get_logged_metrics_history()) > logged)
        return answers

    def _log(self, tallies: dict[str, Tally], timed: bool) -> None:
        """Log the tallies. If `timed`, the base already reported its time and tokens, and lmms-eval would sum both."""
        total = Tally.total(list(tallies.values()))
        metrics = total.to_metrics(self._shares)
        if len(tallies) > 1:
            for task, tally in tallies.items():
                metrics |= {f"{task}/{name}": value for name, value in tally.to_metrics(self._shares).items()}
        seconds, tokens = (0.0, 0) if timed else (total.seconds, total.new_tokens)
        log_metrics(seconds, tokens, tokens / seconds if seconds else 0.0, additional_metrics=metrics)


class TokenPrune(lmms):
    """The model class `tokenprune` of lmms-eval. Instances are of a subclass of the base's class."""

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> lmms:
        """Return the model of `--model_args`. See `load` for errors."""
        further = {name: value for name, value in (additional_config or {}).items() if value is not None}
        return load(**simple_parse_args_string(arg_string), **further, force_simple=cls.is_simple)

    def loglikelihood(self, requests: list[Any]) -> Any:
        raise NotImplementedError("use load(), which returns a subclass of the base")

    generate_until = generate_until_multi_round = loglikelihood


class TokenPruneChat(TokenPrune):
    """The class for bases with chat messages. lmms-eval uses `TokenPrune` with `--force_simple`."""

    is_simple = False


def load(base: str | None = None, *, force_simple: bool = False, **arguments: Any) -> lmms:
    """Load a model of lmms-eval and patch it, for `simple_evaluate(model=...)`.

    Args:
        base: Name of a model of lmms-eval, see `BASES`.
        force_simple: Use the base's simple class even if it has a class for chat templates.
        **arguments: Arguments of tokenprune (method, keep, options) and of the base (pretrained, device). See
            docs/measure/lmms-eval.md.

    Raises:
        UnsupportedModelError: If the base does not contain a model that can be patched.
        OptionError: If an argument is not valid. Arguments are checked before weights are loaded.
        TokenPruneError: The errors of `tokenprune.patch`.
    """
    cls = _get_base_class(base, force_simple)
    parsed = parse_arguments(arguments, base, *_find_parameters(cls))
    patched_class = type(f"TokenPrune{cls.__name__}", (Measured, cls), {"__module__": __name__, "__doc__": cls.__doc__})
    lm = patched_class(**parsed.rest)
    model = getattr(lm, "model", None)
    if not isinstance(model, nn.Module) or not hasattr(model, "generate"):
        raise UnsupportedModelError(f"base={base} does not contain a generative model of transformers. {_WORK}")
    get_adapter(model)
    patched_class._shares = not parsed.acts_on_pixels
    if parsed.config is not None:
        _patch(lm, parsed)
    return lm


def _patch(lm: Any, parsed: ModelArguments) -> None:
    processor = None
    if parsed.acts_on_pixels or parsed.guard != "off":  # the guard needs the processor to read prompts
        names = ("processor", "_processor", "_image_processor", "image_processor")
        processor = next((part for name in names if callable(part := getattr(lm, name, None))), None)
    tokenprune.patch(lm.model, config=parsed.config, guard=parsed.guard, processor=processor)


def _get_base_class(base: str | None, force_simple: bool) -> type:
    if base is None:
        raise OptionError(f"base= is missing. Pass the name of a model of lmms-eval. {_WORK}")
    names = MODEL_REGISTRY_V2.list_model_names()
    if base not in names:
        close = difflib.get_close_matches(str(base), names, n=3, cutoff=0.5)
        hint = f"Did you mean {' or '.join(map(repr, close))}? " if close else ""
        raise OptionError(f"base={base} is not a model of lmms-eval. {hint}{_WORK}")
    resolved = MODEL_REGISTRY_V2.resolve(base, force_simple)
    if resolved.class_path.startswith(("lmms_eval.", "tokenprune_bench.")) and resolved.model_id not in BASES:
        raise UnsupportedModelError(f"base={base} does not use a supported model of transformers. {_WORK}")
    if resolved.model_id not in TESTED:
        logger.warning(f"tokenprune was not tested with base={base}. First compare method=none with the base.")
    try:
        return MODEL_REGISTRY_V2.get_model_class(base, force_simple)
    except ImportError as error:
        raise TokenPruneError(
            f"base={base} needs a missing package ({error}). Run pip install 'tokenprune-bench[lmms-eval]'"
        ) from error


def _find_parameters(cls: type) -> tuple[set[str], bool]:
    """Return the constructor parameters of a class and its bases, and True if it accepts others.

    Classes of lmms-eval accept other arguments and then reject them without naming them.
    """
    named: set[str] = set()
    for base in (parent for parent in cls.__mro__ if "__init__" in vars(parent)):
        parameters = list(inspect.signature(base.__init__).parameters.values())[1:]
        named |= {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
        if not any(each.kind is each.VAR_KEYWORD for each in parameters):
            break
    kinds = {each.kind for each in inspect.signature(cls.__init__).parameters.values()}
    return named, inspect.Parameter.VAR_KEYWORD in kinds and not cls.__module__.startswith("lmms_eval.")
