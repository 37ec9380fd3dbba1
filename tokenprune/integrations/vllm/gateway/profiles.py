# SPDX-License-Identifier: Apache-2.0
"""Choice of a request's profile: by the model name it asks for (`NAME:PROFILE`), by its own key, by who calls, or by
the number of requests in flight. None of these needs --trust-request-mm-kwargs.

vLLM offers a plugin no place between a request and its processor, and the processor sees neither the model's name nor
a key that vLLM does not trust. So we wrap `OnlineRenderer.preprocess_chat`, which handles chat completions, responses
and messages, and read the profile before it runs. `AsyncLLM` gives the number of requests in flight. Other endpoints
with images refuse a model name that asks for a profile.
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
    """Return the load of a front end by vLLM's `BaseRenderer`, of which it has one."""
    if not hasattr(renderer, _LOAD):
        setattr(renderer, _LOAD, RequestLoad())
    return getattr(renderer, _LOAD)


def check_hooks(server: ServerConfig) -> None:
    """Raise UnsupportedSetupError if there are profiles or callers, but the installed vLLM lacks the hooks."""
    if server.names or server.callers is not None:
        require_hooks(missing_hooks("profiles"))
    if server.callers is not None and answers.is_server():
        require_hooks(missing_hooks("header"))


def attach(server: ServerConfig) -> None:
    """Let requests choose a profile from now on. Raises UnsupportedSetupError as `check_hooks` does."""
    check_hooks(server)
    if problems := missing_hooks("profiles"):
        logger.debug("requests cannot choose profiles in this vLLM: %s", "; ".join(problems))
        return
    from vllm.entrypoints.pooling.base.serving import PoolingBaseServing
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
    from vllm.renderers.online_renderer import OnlineRenderer

    on_start(watch)
    wrap(OnlineRenderer, "preprocess_chat", _with_profiles)
    for serving in (PoolingBaseServing, ServingTokens):
        wrap(serving, "_check_model", _without_profiles)


def watch(engine: Any) -> None:
    """Follow the load of an engine that has started."""
    load, model_config = get_load(engine.renderer), engine.vllm_config.model_config
    load.engine = weakref.ref(engine)
    if get_server_setting(model_config) is not None:
        load.show_step(model_config)
    load.share_count()


def _with_profiles(preprocess: Any) -> Any:
    """Return what processes a chat, with the profile of its request."""

    async def preprocess_chat(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if get_server_setting(self.model_config) is None:
            return await preprocess(self, request, *args, **kwargs)
        load = get_load(self.renderer)
        renderer = _with_profile(self, request, load)
        with load.count_request():
            return await preprocess(renderer, request, *args, **kwargs)

    return preprocess_chat


def _without_profiles(check: Any) -> Any:
    """Return the check of a request's model, for endpoints whose requests cannot be given a profile."""

    async def check_model(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if get_server_setting(self.model_config) is not None:
            _check_no_profile(self.model_config, request)
        return await check(self, request, *args, **kwargs)

    return check_model


def _check_no_profile(model_config: Any, request: Any) -> None:
    """Raise OptionError for a request whose model's name or caller asks for a profile other than the server's own
    setting, and for one whose key asks for a profile that its caller may not use."""
    given = (getattr(request, "mm_processor_kwargs", None) or {}).get(KEY, {})
    asked = given if isinstance(given, Mapping) else {}
    name = functools.partial(_asked_for, given, request, model_config)
    by, server = NAME, find_server_config(model_config, name)
    with metrics.count_refusals(model_config, "setting", RequestRecord()):
        may = _may_use(server)
        profile = name(server)
        if profile is None and may is not None:
            by, profile = CALLER, may[0]
        setting = server.profile(DEFAULT if profile is None else profile, may if by == NAME else None)
        if PROFILE not in asked and setting != server.profile(DEFAULT):
            who = repr(request.model) if by == NAME else "this caller"
            raise OptionError(
                f"{KEY}: {who} asks for profile {profile!r}, and this endpoint knows the server's own setting alone: "
                f"ask for {model_config.served_model_name!r}"
            )
        check_request_setting(server.setting(given), model_config)  # a wrong setting is refused beside text alone, too


def _may_use(server: ServerConfig) -> tuple[str, ...] | None:
    """Return the profiles that the caller of this request may use; None on a server without a rule of callers."""
    return None if server.callers is None else server.callers.may_use(answers.get_exchange().headers)


def _with_profile(renderer: Any, request: Any, load: RequestLoad) -> Any:
    """Write the profile of a request into its `mm_processor_kwargs`; return the renderer that takes it.

    renderer: vLLM's `OnlineRenderer`. Raises OptionError, which is answered with HTTP 400.
    """
    from vllm.renderers.online_renderer import validate_request_mm_kwargs

    model_config = renderer.model_config
    exchange = answers.get_exchange()
    # The client's header goes before the body, as in vLLM; not in responses, whose id is the answer's.
    header = exchange.header_id if hasattr(request, "messages") else None
    given_id = header or getattr(request, "request_id", None)
    served = RequestRecord(request=clean_id(given_id))
    given = getattr(request, "mm_processor_kwargs", None) or {}
    trusted = renderer.trust_request_mm_kwargs
    # What is not ours is vLLM's to allow.
    others = {key: value for key, value in given.items() if key != KEY}
    media = getattr(request, "media_io_kwargs", None)
    validate_request_mm_kwargs(mm_processor_kwargs=others, media_io_kwargs=media, trust_request_mm_kwargs=trusted)
    with metrics.count_refusals(model_config, "setting", served):
        # Before its images are read, which vLLM's own place for this is not.
        ServePolicy(model_config).check_parameters(request)
        asked = given.get(KEY, {})
        server = find_server_config(model_config, functools.partial(_asked_for, asked, request, model_config))
        if not trusted:
            _check_only_profile(asked, server)
        model, under_load = getattr(request, "model", None), functools.partial(load.profile, server)
        may = _may_use(server)
        asked, served.by = choose_profile(asked, server, model, model_config.served_model_name, under_load, may)
        setting = check_request_setting(
            server.setting(asked), model_config
        )  # no processor does where there is text alone
    request.mm_processor_kwargs = others | {KEY: Choice(asked, server, setting, served, draw_lot(given_id))}
    exchange.records.append(served)
    if trusted:
        return renderer
    renderer = copy.copy(renderer)  # for this request, of which all has been checked
    renderer.trust_request_mm_kwargs = True
    return renderer


def _check_only_profile(asked: Any, server: ServerConfig) -> None:
    if isinstance(asked, Mapping) and set(asked) <= {PROFILE}:
        return
    there = f"one of {', '.join(server.names)}" if server.names else "and it names none"
    raise OptionError(
        f"{KEY}: of this server a request can choose a profile alone, {there}: "
        f'{{"{PROFILE}": "{next(iter(server.names), DEFAULT)}"}}. Start it with --trust-request-mm-kwargs to let '
        "requests write settings"
    )


def _asked_for(asked: Any, request: Any, model_config: Any, server: ServerConfig) -> Any:
    """Return the profile that a request names by its key, or else by its model's name; None if it names none."""
    if isinstance(asked, Mapping) and PROFILE in asked:
        return asked[PROFILE]
    return _named(getattr(request, "model", None), server, model_config.served_model_name)


def _named(model: str | None, server: ServerConfig, served: str) -> str | None:
    """Return the profile that a model's name asks for, whether or not there is one; None if it asks for none."""
    name, _, suffix = (model or "").rpartition(":")
    has = bool(server.names) or server.file is not None  # which may have had some
    return suffix if has and name and (suffix in server.profiles or name == served) else None


def choose_profile(
    asked: Any, server: ServerConfig, model: str | None, served: str, under_load: Callable[[], str],
    may: tuple[str, ...] | None = None,
) -> tuple[Any, str]:  # fmt: skip
    """Return the value of our key for a request, with its profile, and who chose it; empty if nobody did.

    asked: the request's own value. model: the model name that it asks for. served: the model's first name. under_load:
    gives the profile of a request that chooses nothing. may: profiles that its caller may use, the caller's own first;
    None: all. Raises ProfileError or CallerError.
    """
    if not isinstance(asked, Mapping):
        return asked, BY_KEY  # and refused where it is read
    by = BY_KEY if asked else DEFAULT
    if PROFILE not in asked:
        if (profile := _named(model, server, served)) is not None:
            asked, by = {PROFILE: profile} | dict(asked), BY_KEY if asked else NAME
        elif may is not None and may[0] != DEFAULT:
            asked, by = {PROFILE: may[0]} | dict(asked), BY_KEY if asked else CALLER
        elif not asked and (profile := under_load()) != DEFAULT:
            return {PROFILE: profile}, LOAD  # the operator's choice, so whatever the caller may ask for
    if PROFILE in asked:
        server.profile(asked[PROFILE], may)
    return asked, by
