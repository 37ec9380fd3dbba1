# SPDX-License-Identifier: Apache-2.0
"""The model that lmms-eval makes: one of its own, with a patch on its model of transformers, and measurements."""

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
from tokenprune_bench.lmms_eval.arguments import ModelArguments, read
from tokenprune_bench.lmms_eval.bases import BASES, TESTED, UNTESTED
from tokenprune_bench.lmms_eval.measure import Tally, watched

_WORK = f"these work: {', '.join(TESTED)}; these should, but are not tested: {', '.join(UNTESTED)}"


class Measured:
    """Mixed into a model of lmms-eval: every answer is measured, and the sums end up in `throughput` of the results."""

    _shares = True  # see Tally.numbers

    def generate_until(self, requests: list[Any]) -> list[Any]:
        return self._measured("generate_until", requests)

    def generate_until_multi_round(self, requests: list[Any]) -> list[Any]:
        return self._measured("generate_until_multi_round", requests)

    def _measured(self, kind: str, requests: list[Any]) -> list[Any]:
        answers: list[Any] = [None] * len(requests)
        places: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            places.setdefault(request.task_name, []).append(place)
        logged = len(get_logged_metrics_history())
        tallies: dict[str, Tally] = {}
        for task, mine in places.items():
            with watched(self.model) as tally:
                some = getattr(super(), kind)([requests[place] for place in mine])
            tallies[task] = tally
            for place, answer in zip(mine, some, strict=True):
                answers[place] = answer
        self._log(tallies, timed=len(get_logged_metrics_history()) > logged)
        return answers

    def _log(self, tallies: dict[str, Tally], timed: bool) -> None:
        """Log the tallies. timed: True if the base has reported its time and tokens to lmms-eval already; they are
        summed there."""
        total = Tally.total(list(tallies.values()))
        numbers = total.numbers(self._shares)
        if len(tallies) > 1:
            for task, tally in tallies.items():
                numbers |= {f"{task}/{name}": value for name, value in tally.numbers(self._shares).items()}
        seconds, tokens = (0.0, 0) if timed else (total.seconds, total.new_tokens)
        log_metrics(seconds, tokens, tokens / seconds if seconds else 0.0, additional_metrics=numbers)


class TokenPrune(lmms):
    """The model class that lmms-eval finds under the name `tokenprune`; the instance is a subclass of the base's
    class."""

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> lmms:
        """Return the model that `--model_args` describe; `load` says what it raises."""
        further = {name: value for name, value in (additional_config or {}).items() if value is not None}
        return load(**simple_parse_args_string(arg_string), **further, force_simple=cls.is_simple)

    def loglikelihood(self, requests: list[Any]) -> Any:
        raise NotImplementedError("made by load(), which returns another class")

    generate_until = generate_until_multi_round = loglikelihood


class TokenPruneChat(TokenPrune):
    """The same, for bases that take messages; lmms-eval takes the other with `--force_simple`."""

    is_simple = False


def load(base: str | None = None, *, force_simple: bool = False, **arguments: Any) -> lmms:
    """Make a model of lmms-eval, patch what it holds, and return it; `simple_evaluate(model=...)` takes it.

    base:         the name of one of lmms-eval's models, see `BASES`.
    force_simple: the base's simple class even where it has one for chat templates.
    arguments:    ours (method, keep, ..., the method's options) and the base's (pretrained, device, ...), as in
                  docs/measure/lmms-eval.md.

    Raises UnsupportedModelError for a base that holds no model we can patch, and what `tokenprune.patch` raises; what
    is wrong with the arguments is said before weights are loaded.
    """
    cls = _base_class(base, force_simple)
    given = read(arguments, base, *_parameters(cls))
    made = type(f"TokenPrune{cls.__name__}", (Measured, cls), {"__module__": __name__, "__doc__": cls.__doc__})
    lm = made(**given.rest)
    model = getattr(lm, "model", None)
    if not isinstance(model, nn.Module) or not hasattr(model, "generate"):
        raise UnsupportedModelError(f"base={base} holds no model of transformers that generates; {_WORK}")
    get_adapter(model)
    made._shares = not given.acts_on_pixels
    if given.config is not None:
        _patch(lm, given)
    return lm


def _patch(lm: Any, given: ModelArguments) -> None:
    processor = None
    if given.acts_on_pixels or given.guard != "off":  # the guard reads prompts with it
        names = ("processor", "_processor", "_image_processor", "image_processor")
        processor = next((one for name in names if callable(one := getattr(lm, name, None))), None)
    tokenprune.patch(lm.model, config=given.config, guard=given.guard, processor=processor)


def _base_class(base: str | None, force_simple: bool) -> type:
    if base is None:
        raise OptionError(f"base= is missing, the name of the model of lmms-eval that is to be patched; {_WORK}")
    names = MODEL_REGISTRY_V2.list_model_names()
    if base not in names:
        close = difflib.get_close_matches(str(base), names, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
        raise OptionError(f"base={base} is no model of lmms-eval: {hint}{_WORK}")
    resolved = MODEL_REGISTRY_V2.resolve(base, force_simple)
    if resolved.class_path.startswith(("lmms_eval.", "tokenprune_bench.")) and resolved.model_id not in BASES:
        raise UnsupportedModelError(
            f"base={base} does not answer with a model of transformers that we support; {_WORK}"
        )
    if resolved.model_id not in TESTED:
        logger.warning(f"tokenprune was not tested with base={base}: compare method=none with the base itself first")
    try:
        return MODEL_REGISTRY_V2.get_model_class(base, force_simple)
    except ImportError as error:
        raise TokenPruneError(
            f"base={base} needs a package that is missing ({error}): pip install 'tokenprune-bench[lmms-eval]'"
        ) from error


def _parameters(cls: type) -> tuple[set[str], bool]:
    """Return the names that a class's constructor takes, handed on to its bases or not, and True if it accepts others.
    lmms-eval's own accept others, and then refuse them without a name."""
    named: set[str] = set()
    for one in (each for each in cls.__mro__ if "__init__" in vars(each)):
        parameters = list(inspect.signature(one.__init__).parameters.values())[1:]
        named |= {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
        if not any(each.kind is each.VAR_KEYWORD for each in parameters):
            break
    kinds = {each.kind for each in inspect.signature(cls.__init__).parameters.values()}
    return named, inspect.Parameter.VAR_KEYWORD in kinds and not cls.__module__.startswith("lmms_eval.")
