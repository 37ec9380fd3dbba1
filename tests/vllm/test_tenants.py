# SPDX-License-Identifier: Apache-2.0
"""Rules of an operator that a server reloads: the profile of each caller, and the share of requests that is pruned."""

from __future__ import annotations

import base64
import hashlib
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpoints import CHECKPOINTS
from conftest import DIVPRUNE
from front_end import config, samples
from server import CALL, Server, serve, write_messages
from tokenprune.errors import OptionError, UnsupportedSetupError
from tokenprune.integrations.vllm import compat
from tokenprune.integrations.vllm.gateway import answers, profiles
from tokenprune.integrations.vllm.gateway.choice import draw_lot
from tokenprune.integrations.vllm.settings.callers import CallerError
from tokenprune.integrations.vllm.settings.keys import PROFILE
from tokenprune.integrations.vllm.settings.server_config import get_server_config

NAME = "llava"
NUM_KEPT = {"default": 9, "half": 18, "fast": 4, "ocr": 36}  # kept tokens of an image
ALICE, BOB, CAROL = "sk-alice-1234567890", "sk-bob-1234567890", "sk-carol-1234567890"
PROFILES = {"half": {"keep": 0.5}, "fast": {"keep": 0.11}, "ocr": {"off": True}}


def digest(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


CALLERS = {"profiles": {digest(ALICE): ["fast", "ocr"], digest(BOB): "half"}}
OFFER = {"profiles": PROFILES, "callers": CALLERS}


# -- requests, without a server


def choose(
    override: Any, allowed: tuple[str, ...] | None, model: str = "tiny", load: str = "default"
) -> tuple[Any, str]:
    offer = SimpleNamespace(names=list(PROFILES), profiles={"default": {}} | PROFILES, profile=lambda *_: None)
    return profiles.choose_profile(override, offer, model, "tiny", lambda: load, allowed)


def test_priority_of_choices() -> None:
    """A request's choice has priority over the caller's profile, which has priority over the load and the default."""
    fast = ("fast", "ocr")
    assert choose({}, None) == ({}, "default") and choose({}, ("default",)) == ({}, "default")
    assert choose({}, None, load="half") == choose({}, ("default",), load="half") == ({PROFILE: "half"}, "load")
    assert choose({}, fast) == choose({}, fast, load="half") == ({PROFILE: "fast"}, "caller")
    assert choose({}, fast, "tiny:ocr") == ({PROFILE: "ocr"}, "name")
    assert choose({PROFILE: "ocr"}, fast, "tiny:fast") == ({PROFILE: "ocr"}, "key")
    # If requests are trusted, a request's setting has priority over the caller's profile.
    assert choose({"keep": 0.5}, fast) == ({PROFILE: "fast", "keep": 0.5}, "key")
    assert choose({"keep": 0.5}, ("default",)) == ({"keep": 0.5}, "key")


@pytest.fixture
def model_config(folder: Callable[[str], Path], request: pytest.FixtureRequest) -> Any:
    name = request.node.name.partition("[")[0]
    return config(folder(NAME), DIVPRUNE | OFFER, served_model_name=name)


@pytest.fixture
def set_caller(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Return a function that sets the API key of the following requests."""

    def call(key: str | None) -> None:
        headers = () if key is None else ((b"authorization", f"Bearer {key}".encode()),)
        monkeypatch.setattr(answers, "get_exchange", lambda: answers.Exchange(headers))

    return call


@pytest.mark.parametrize("requested", ["half", "default", "fsat", ["fast"]])
def test_a_caller_names_no_other_profile(model_config: Any, set_caller: Any, requested: Any) -> None:
    set_caller(ALICE)
    offer = get_server_config(model_config)
    allowed = profiles._get_allowed(offer)
    assert allowed == ("fast", "ocr")
    with pytest.raises(CallerError, match="it may use fast, ocr"):
        profiles.choose_profile({PROFILE: requested}, offer, "tiny", "tiny", lambda: "default", allowed)
    if isinstance(requested, str) and requested != "fsat":
        with pytest.raises(CallerError):
            profiles.choose_profile({}, offer, f"tiny:{requested}", "tiny", lambda: "default", allowed)


def test_endpoints_without_profiles_refuse_a_caller_that_has_one(model_config: Any, set_caller: Any) -> None:

    def ask(model: str = model_config.served_model_name, **setting: Any) -> None:
        kwargs = {"tokenprune": setting} if setting else None
        profiles._check_no_profile(model_config, SimpleNamespace(model=model, mm_processor_kwargs=kwargs))

    for caller in (None, CAROL):
        set_caller(caller)
        ask()
        ask(keep=0.5)
        with pytest.raises(CallerError, match="may not use profile 'fast'; it may use default"):
            ask(profile="fast")
    set_caller(ALICE)
    with pytest.raises(OptionError, match="this caller selects profile 'fast', and this endpoint supports"):
        ask()
    with pytest.raises(OptionError, match="this caller selects profile 'fast', and this endpoint supports"):
        ask(keep=0.5)
    ask(profile="fast")
    ask(profile="ocr")
    for refused in ({"profile": "half"}, {"profile": "default"}):
        with pytest.raises(CallerError):
            ask(**refused)
    with pytest.raises(CallerError):
        ask(f"{model_config.served_model_name}:half")
    counted = samples("tokenprune:refusals_total", model_config.served_model_name)
    assert {labels: value for labels, value in counted.items() if value} == {("caller",): 5, ("setting",): 2}


def test_missing_header_hook_stops_the_server(folder: Callable[[str], Path], monkeypatch: Any) -> None:
    """Only if a rule needs the header. A program that calls `LLM(...)` does not have callers."""
    monkeypatch.setitem(compat.HOOKS, "header", {"vllm.gone:Gone": ""})
    monkeypatch.setattr(answers, "is_server", lambda: False)  # another test of this process may have set it
    config(folder(NAME), DIVPRUNE | OFFER)
    monkeypatch.setattr(answers, "is_server", lambda: True)
    with pytest.raises((UnsupportedSetupError, ValueError), match=f"vLLM {compat.TESTED} lacks"):
        config(folder(NAME), DIVPRUNE | OFFER)


# -- a server


@pytest.fixture(scope="module")
def offer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("offer") / "offer.json"


@pytest.fixture(scope="module")
def server(folder: Callable[[str], Path], offer_file: Path, tmp_path_factory: Any) -> Iterator[Server]:
    offer_file.write_text(json.dumps(OFFER))
    setting = DIVPRUNE | {"reload": str(offer_file), "log": "json"}
    arguments = ["--served-model-name", "tiny", *(f"tiny:{profile}" for profile in [*PROFILES, "default"])]
    arguments += ["--api-key", ALICE, BOB, CAROL]
    with serve(folder(NAME), tmp_path_factory.mktemp("tenants"), setting, *arguments) as running:
        yield running


def reload(server: Server, file: Path, offer: dict[str, Any]) -> None:
    name, labels = "tokenprune:reloads_total", 'model_name="tiny",result="taken"'
    before = server.counted(name)[labels]
    file.write_text(json.dumps(offer))
    server.process.send_signal(signal.SIGHUP)
    end = time.monotonic() + CALL
    while server.counted(name)[labels] == before:
        assert time.monotonic() < end, server.story("the signal was not heard")
        time.sleep(0.1)


def ask(server: Server, *keys: str, model: str = "tiny", seed: int = 0, id: str | None = None, **more: Any) -> Any:
    """Return the header of an answer, as a dictionary, or the status and the text of a refusal."""
    messages = write_messages(CHECKPOINTS[NAME].images(1, seed=seed), "what? ")
    headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
    headers |= {} if id is None else {"X-Request-Id": id}
    body = {"model": model, "max_tokens": 1, "messages": messages} | more
    status, answered, text = server.post("/v1/chat/completions", body, **headers)
    if status != 200:
        return status, text
    method, *rest = answered["x-tokenprune"].split(";")
    return {"method": method} | dict(part.split("=") for part in rest)


def test_callers_get_their_profiles(server: Server) -> None:
    for key, model, profile, by in (
        (ALICE, "tiny", "fast", "caller"), (ALICE, "tiny:ocr", "ocr", "name"), (ALICE, "tiny:fast", "fast", "name"),
        (BOB, "tiny", "half", "caller"), (CAROL, "tiny", "default", "default"),
    ):  # fmt: skip
        header = ask(server, key, model=model)
        assert (header["profile"], header["by"], header["out"]) == (profile, by, str(NUM_KEPT[profile]))
    for key, allowed, refused in ((ALICE, "fast, ocr", "half"), (BOB, "half", "fast"), (CAROL, "default", "ocr")):
        for arguments in ({"model": f"tiny:{refused}"}, {"mm_processor_kwargs": {"tokenprune": {"profile": refused}}}):
            status, text = ask(server, key, **arguments)
            assert status == 400 and f"may not use profile '{refused}'; it may use {allowed}" in text
    assert ask(server, "sk-nobody")[0] == ask(server)[0] == 401
    counted = server.counted("tokenprune:requests_total")
    assert counted['by="caller",model_name="tiny",profile="fast"'] == 1
    assert server.counted("tokenprune:refusals_total")['model_name="tiny",reason="caller"'] == 6


def test_reload_changes_the_callers(server: Server, offer_file: Path) -> None:
    callers = {"profiles": {digest(ALICE): "half"}, "others": []}
    reload(server, offer_file, OFFER | {"callers": callers})
    assert ask(server, ALICE)["profile"] == "half"
    assert ask(server, ALICE, model="tiny:fast")[0] == 400
    status, text = ask(server, BOB)
    assert status == 400 and "the API key of this request is not assigned to a profile" in text
    reload(server, offer_file, OFFER)
    assert ask(server, ALICE)["profile"] == "fast"


def test_rollout_in_steps(server: Server, offer_file: Path) -> None:
    ids = [f"request-{index}" for index in range(6)]
    reduced = {id for id in ids if draw_lot(id) < 0.5}
    assert 0 < len(reduced) < len(ids)
    for share, pruned_ids in ((0.0, set()), (0.5, reduced), (1.0, set(ids))):
        reload(server, offer_file, OFFER | {"rollout": share})
        for id in ids:
            header = ask(server, CAROL, id=id)
            assert (header["in"], header["profile"]) == ("36", "default")
            more = {} if id in pruned_ids else {"full": "rollout", "shadow": "9"}
            assert header["out"] == ("9" if id in pruned_ids else "36") and header.items() >= more.items()
            assert ("full" in header) == (id not in pruned_ids)
    num_held = 2 * len(ids) - len(reduced)
    assert server.counted("tokenprune:shadow_requests_total") == {
        f'model_name="tiny",outcome="{outcome}",profile="{profile}"': num_held
        if (outcome, profile) == ("kept", "default")
        else 0
        for outcome in ("kept", "failed", "input")
        for profile in ("default", "half", "fast")
    }
    tokens = server.counted("tokenprune:shadow_tokens_total")
    assert tokens['keep="0.25",method="divprune",model_name="tiny",stage="in"'] == 36 * num_held
    assert tokens['keep="0.25",method="divprune",model_name="tiny",stage="out"'] == 9 * num_held


def test_no_key_is_written_anywhere(server: Server) -> None:
    """Neither plain nor hashed, neither in the log, with lines for each request and refusal, nor at /metrics."""
    text = server.log.read_text() + server.get("/metrics", CALL)
    assert '"event": "refusal"' in text and 'by="caller"' in text
    for key in (ALICE, BOB, CAROL):
        for form in (key, digest(key)[7:], base64.b64encode(key.encode()).decode()):
            assert form not in text
