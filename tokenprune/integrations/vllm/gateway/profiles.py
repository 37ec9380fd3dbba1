# SPDX-License-Identifier: Apache-2.0
"""Selection of a request's profile: by its model name (`NAME:PROFILE`), its key, its caller, or the load.

The selection works without --trust-request-mm-kwargs. vLLM does not let plugins act between a request and its
processor, and the processor sees neither the model's name nor an untrusted key. The plugin therefore wraps
`OnlineRenderer.preprocess_chat`, which handles chat completions, responses and messages. `AsyncLLM` provides the number
of requests in flight. Other endpoints with images refuse model names that select a profile.
"""

from __future__ import annotations

import copy
import functools
import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from tokenprune.errors import OptionError
from tokenprune.integrations.vllm.compat import missing_hooks, on_start, require_hooks, wrap
from tokenprune.integrations.vllm.frontend import metrics
from tokenprune.integrations.vllm.frontend.served import BY_KEY, CALLER, LOAD, NAME, RequestRecord
from tokenprune.integrations.vllm.gateway import answers
from tokenprune.integrations.vllm.gateway.choice import Choice, draw_lot
from tokenprune.integrations.vllm.gateway.in_flight import RequestLoad
from tokenprune.integrations.vllm.gateway.policy import ServePolicy
from tokenprune.integrations.vllm.log import clean_id
from tokenprune.integrations.vllm.settings.configuration import check_request_setting, get_server_setting
from tokenprune.integrations.vllm.settings.keys import DEFAULT, KEY, PROFILE
from tokenprune.integrations.vllm.settings.server_config import ServerConfig, find_server_config

logger = logging.getLogger(__name__)
_LOAD = f"{KEY}_load"


def get_load(renderer: Any) -> RequestLoad:
    """Return the load of a front end, which has one `BaseRenderer`."""
    if not hasattr(renderer, _LOAD):
        setattr(renderer, _LOAD, RequestLoad())
    return getattr(renderer, _LOAD)


def check_hooks(server: ServerConfig) -> None:
    """Raise UnsupportedSetupError if there are profiles or callers and the installed vLLM lacks the hooks."""
    if server.names or server.callers is not None:
        require_hooks(missing_hooks("profiles"))
    if server.callers is not None and answers.is_server():
        require_hooks(missing_hooks("header"))


def attach(server: ServerConfig) -> None:
    """Let requests select profiles; raises UnsupportedSetupError like `check_hooks`."""
    check_hooks(server)
    if problems := missing_hooks("profiles"):
        logger.debug("requests cannot choose profiles in this vLLM: %s", "; ".join(problems))
        return
    from vllm.entrypoints.pooling.base.serving import PoolingBaseServing
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
    from vllm.renderers.online_renderer import OnlineRenderer

    on_start(watch)
    wrap(OnlineRenderer, "preprocess_chat", _wrap_preprocess)
    for serving in (PoolingBaseServing, ServingTokens):
        wrap(serving, "_check_model", _wrap_model_check)


def watch(engine: Any) -> None:
    """Track the load of an engine that has started."""
    load, model_config = get_load(engine.renderer), engine.vllm_config.model_config
    load.engine = weakref.ref(engine)
    if get_server_setting(model_config) is not None:
        load.show_step(model_config)
    load.share_count()


def _wrap_preprocess(preprocess: Any) -> Any:
    """Wrap the function that processes a chat, to add the profile of its request."""

    async def preprocess_chat(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if get_server_setting(self.model_config) is None:
            return await preprocess(self, request, *args, **kwargs)
        load = get_load(self.renderer)
        renderer = _apply_profile(self, request, load)
        with load.count_request():
            return await preprocess(renderer, request, *args, **kwargs)

    return preprocess_chat


def _wrap_model_check(check: Any) -> Any:
    """Wrap the check of a request's model, for endpoints that do not support profiles."""

    async def check_model(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if get_server_setting(self.model_config) is not None:
            _check_no_profile(self.model_config, request)
        return await check(self, request, *args, **kwargs)

    return check_model


def _check_no_profile(model_config: Any, request: Any) -> None:
    """Raise OptionError if a request of an endpoint without profiles selects one.

    The model name and the caller must select the server's own setting, and the key only a profile that the caller may
    use.
    """
    requested = (getattr(request, "mm_processor_kwargs", None) or {}).get(KEY, {})
    keys = requested if isinstance(requested, Mapping) else {}
    find_name = functools.partial(_find_profile, requested, request, model_config)
    by, server = NAME, find_server_config(model_config, find_name)
    with metrics.count_refusals(model_config, "setting", RequestRecord()):
        allowed = _get_allowed(server)
        profile = find_name(server)
        if profile is None and allowed is not None:
            by, profile = CALLER, allowed[0]
        setting = server.profile(DEFAULT if profile is None else profile, allowed if by == NAME else None)
        if PROFILE not in keys and setting != server.profile(DEFAULT):
            who = repr(request.model) if by == NAME else "this caller"
            raise OptionError(
                f"{KEY}: {who} selects profile {profile!r}, and this endpoint supports only the server's own setting. "
                f"Use the model name {model_config.served_model_name!r}."
            )
        check_request_setting(server.setting(requested), model_config)  # also for requests with text only


def _get_allowed(server: ServerConfig) -> tuple[str, ...] | None:
    """Return the profiles that the caller of the current request may use. None without a rule of callers."""
    return None if server.callers is None else server.callers.may_use(answers.get_exchange().headers)


def _apply_profile(renderer: Any, request: Any, load: RequestLoad) -> Any:
    """Write the profile of a request into its `mm_processor_kwargs`, and return a renderer that accepts them.

    It is `renderer` if the server trusts `mm_processor_kwargs` of requests, else a copy that trusts them, because they
    are checked here.

    Raises:
        OptionError: If the request is refused (HTTP 400).
    """
    from vllm.renderers.online_renderer import validate_request_mm_kwargs

    model_config = renderer.model_config
    exchange = answers.get_exchange()
    # The client's header has precedence over the body, as in vLLM, except for responses, which get their own id.
    header = exchange.header_id if hasattr(request, "messages") else None
    request_id = header or getattr(request, "request_id", None)
    served = RequestRecord(request=clean_id(request_id))
    kwargs = getattr(request, "mm_processor_kwargs", None) or {}
    trusted = renderer.trust_request_mm_kwargs
    # vLLM decides about the other keys.
    others = {key: value for key, value in kwargs.items() if key != KEY}
    media = getattr(request, "media_io_kwargs", None)
    validate_request_mm_kwargs(mm_processor_kwargs=others, media_io_kwargs=media, trust_request_mm_kwargs=trusted)
    with metrics.count_refusals(model_config, "setting", served):
        # vLLM's own check runs only after the images are read.
        ServePolicy(model_config).check_parameters(request)
        requested = kwargs.get(KEY, {})
        server = find_server_config(model_config, functools.partial(_find_profile, requested, request, model_config))
        if not trusted:
            _check_only_profile(requested, server)
        model, under_load = getattr(request, "model", None), functools.partial(load.profile, server)
        allowed, name = _get_allowed(server), model_config.served_model_name
        requested, served.by = choose_profile(requested, server, model, name, under_load, allowed)
        # The processor does not run for a prompt of text only.
        setting = check_request_setting(server.setting(requested), model_config)
    request.mm_processor_kwargs = others | {KEY: Choice(requested, server, setting, served, draw_lot(request_id))}
    exchange.records.append(served)
    if trusted:
        return renderer
    renderer = copy.copy(renderer)  # for this request, which has been checked
    renderer.trust_request_mm_kwargs = True
    return renderer


def _check_only_profile(requested: Any, server: ServerConfig) -> None:
    """Raise OptionError if an untrusted value has other keys than the profile."""
    if isinstance(requested, Mapping) and set(requested) <= {PROFILE}:
        return
    names = ", ".join(server.names) or "none"
    raise OptionError(
        f"{KEY}: requests to this server can only select a profile (profiles: {names}), as in "
        f'{{"{PROFILE}": "{next(iter(server.names), DEFAULT)}"}}. Start it with --trust-request-mm-kwargs to let '
        "requests write settings"
    )


def _find_profile(requested: Any, request: Any, model_config: Any, server: ServerConfig) -> Any:
    """Return the profile that a request selects by its key, or else by its model name. None if it selects none."""
    if isinstance(requested, Mapping) and PROFILE in requested:
        return requested[PROFILE]
    return _find_in_name(getattr(request, "model", None), server, model_config.served_model_name)


def _find_in_name(model: str | None, server: ServerConfig, served: str) -> str | None:
    """Return the profile that a model name selects, whether or not it exists. None if it selects none."""
    name, _, suffix = (model or "").rpartition(":")
    has_profiles = bool(server.names) or server.file is not None  # the file may have had profiles before
    return suffix if has_profiles and name and (suffix in server.profiles or name == served) else None


def choose_profile(
    requested: Any, server: ServerConfig, model: str | None, served: str, under_load: Callable[[], str],
    allowed: tuple[str, ...] | None = None,
) -> tuple[Any, str]:  # fmt: skip
    """Return the request's value of `KEY` with its profile, and who selected it.

    `model` is the model name in the request, and `served` the first name of the served model. `under_load` returns the
    profile for a request that selects none. `allowed` has the caller's default first, and is None without a rule of
    callers. Raises ProfileError or CallerError.
    """
    if not isinstance(requested, Mapping):
        return requested, BY_KEY  # refused by `ServerConfig.setting`
    by = BY_KEY if requested else DEFAULT
    if PROFILE not in requested:
        if (profile := _find_in_name(model, server, served)) is not None:
            requested, by = {PROFILE: profile} | dict(requested), BY_KEY if requested else NAME
        elif allowed is not None and allowed[0] != DEFAULT:
            requested, by = {PROFILE: allowed[0]} | dict(requested), BY_KEY if requested else CALLER
        elif not requested and (profile := under_load()) != DEFAULT:
            return {PROFILE: profile}, LOAD  # set by the operator, so independent of the caller's profiles
    if PROFILE in requested:
        server.profile(requested[PROFILE], allowed)
    return requested, by
