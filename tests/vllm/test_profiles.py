# SPDX-License-Identifier: Apache-2.0
"""Profiles on a server that accepts no processor arguments of requests, selected by model name, by key and by load."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import slow_steps
from checkpoints import CHECKPOINTS
from conftest import DIVPRUNE
from server import CALL, Server, data_url, serve, write_messages
from test_server import NAME, ask, check, draw_setting, post_setting
from tokenprune.integrations.vllm import check as serve_check

PROFILES = {"half": {"keep": 0.5}, "fast": {"keep": 0.11}, "ocr": {"off": True}}
SETTING = DIVPRUNE | {
    "profiles": PROFILES, "min_keep": 0.1, "methods": ["divprune"],
    "overload": {"in_flight": [1, 2], "profiles": ["half", "fast"], "release": 1, "rise": 0, "dwell": 0}, "log": "json",
}  # fmt: skip
NUM_KEPT = {"default": 9, "half": 18, "fast": 4, "ocr": 35}  # kept tokens of an image


@pytest.fixture(scope="module")
def server(folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = ["--served-model-name", "tiny", "tiny:half", "tiny:fast", "tiny:ocr", "tiny:fsat"]
    arguments += ["--enable-prompt-tokens-details", *slow_steps.ARGUMENTS]
    with serve(folder(NAME), tmp_path_factory.mktemp("profiles"), SETTING, *arguments) as running:
        yield running


def image(seed: int) -> list[Any]:
    return CHECKPOINTS[NAME].images(1, seed=seed)


def test_requests_choose_by_name_and_by_key(server: Server, reference: Any) -> None:
    text = ask(server, [], "what is it? ").usage.prompt_tokens
    assert ask(server, [], "what is it? ", model="tiny:fast").usage.prompt_tokens == text
    cases = [(profile, {"model": f"tiny:{profile}"}) for profile in PROFILES]
    cases += [(profile, {"override": {"profile": profile}}) for profile in [*PROFILES, "default"]]
    cases += [("default", {}), ("default", {"override": {}})]
    cases += [("half", {"override": {"profile": "half"}, "model": "tiny:fast"})]
    lengths = set()
    for profile, arguments in cases:
        reply = ask(server, image(0), "what is it? ", **arguments)
        check(reply, reference, image(0), "what is it? ", PROFILES.get(profile))
        lengths.add((profile, reply.usage.prompt_tokens - NUM_KEPT[profile]))
    assert len({rest for _, rest in lengths}) == 1 and len(lengths) == 4


def test_responses_and_messages_endpoints(server: Server) -> None:
    url = data_url(*image(0))
    part = {"type": "input_image", "image_url": url, "detail": "auto"}
    response = {"max_output_tokens": 1, "input": [{"role": "user", "content": [part]}]}
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    message = {"role": "user", "content": [{"type": "image", "source": source}]}
    requests = (("/v1/responses", response), ("/v1/messages", {"max_tokens": 1, "messages": [message]}))
    used = [
        server.post_json(path, body | {"model": f"tiny:{profile}"})["usage"]
        for path, body in requests
        for profile in PROFILES
    ]
    # Messages count tokens from the prefix cache separately.
    lengths = [usage["input_tokens"] + (usage.get("cache_read_input_tokens") or 0) for usage in used]
    assert [length - lengths[0] for length in lengths] == 2 * [
        0,
        NUM_KEPT["fast"] - NUM_KEPT["half"],
        NUM_KEPT["ocr"] - NUM_KEPT["half"],
    ]


def answer(server: Server, path: str, body: Any, **headers: str) -> tuple[str | None, str]:
    """Return the header with the setting of a request, and the text of the answer."""
    _, answered, text = server.post(path, {"model": "tiny", "max_tokens": 1} | body, **headers)
    return answered.get("x-tokenprune"), text


def find_events(server: Server, request: str) -> list[dict[str, Any]]:
    return [event for event in server.events() if event.get("request") == request and event["event"] != "selection"]


def test_answers_report_their_setting(server: Server) -> None:
    chat, body = "/v1/chat/completions", {"messages": write_messages(image(3))}
    expected = {"profile": "half", "by": "name", "method": "divprune", "keep": 0.5, "images": 1, "videos": 0,
             "tokens_in": 35, "tokens_out": 18}  # fmt: skip
    half = "divprune;keep=0.5;profile=half;by=name;in=35;out=18"
    header, text = answer(server, chat, body | {"model": "tiny:half"})
    reply = json.loads(text)
    assert header == half and reply["usage"]["prompt_tokens_details"]["tokenprune"] == expected
    (line,) = find_events(server, reply["id"].removeprefix("chatcmpl-"))
    assert line.items() >= ({"event": "request"} | expected).items()

    streamed = {"model": "tiny:half", "stream": True, "stream_options": {"include_usage": True}}
    header, text = answer(server, chat, body | streamed)
    assert header == half and '"tokens_out":18' in text.replace(" ", "")

    for path, more, headers, by in (
        (chat, {}, {}, "default"),
        (chat, {"mm_processor_kwargs": {"tokenprune": {"profile": "default"}}}, {"X-Request-Id": "mine.1"}, "key"),
    ):
        header, text = answer(server, path, body | more, **headers)
        assert header == f"divprune;keep=0.25;profile=default;by={by};in=35;out=9"
    (line,) = find_events(server, "mine.1")
    assert line["by"] == "key"
    part = [{"type": "input_image", "image_url": data_url(*image(3)), "detail": "auto"}]
    response = {"model": "tiny:ocr", "max_output_tokens": 1, "input": [{"role": "user", "content": part}]}
    header, text = answer(server, "/v1/responses", response)
    assert (
        header == "off;keep=1.0;profile=ocr;by=name;in=35;out=35"
        and len(find_events(server, json.loads(text)["id"])) == 1
    )

    header, _ = answer(server, chat, body | {"model": "tiny:fsat"}, **{"X-Request-Id": 'no "id"'})
    (line,) = find_events(server, "unreadable")
    assert header is None and line.items() >= {"event": "refusal", "reason": "profile"}.items()
    text_only = {"messages": [{"role": "user", "content": "go on "}]}
    assert answer(server, chat, text_only | {"model": "tiny:half"})[0] is None
    two = {"messages": [body["messages"], body["messages"]]}
    header, text = answer(server, f"{chat}/batch", two)
    assert header is None and len(json.loads(text)["choices"]) == 2, text


@pytest.mark.parametrize(
    ("request_arguments", "says"),
    [
        ({"override": {"profile": "fsat"}}, "profile 'fsat' does not exist. Use one of: half, fast, ocr, default"),
        ({"model": "tiny:fsat"}, "profile 'fsat' does not exist"),
        ({"override": {"profile": ["fast"]}}, "does not exist"),
        ({"override": {"profile": "fast", "keep": 0.5}}, "can only select a profile (profiles: half, fast, ocr)"),
        ({"override": {"keep": 0.5}}, "can only select a profile"),
        ({"override": {"off": True}}, "can only select a profile"),
        ({"override": "fast"}, "can only select a profile"),
        ({"mm_processor_kwargs": {"tokenprune": {"profile": "fast"}, "min_pixels": 1}}, "disabled by default"),
        ({"mm_processor_kwargs": {"min_pixels": 1}}, "disabled by default"),
        ({"media_io_kwargs": {"image": {"mode": "L"}}, "model": "tiny:fast"}, "disabled by default"),
    ],
)
def test_other_arguments_are_refused(
    server: Server, reference: Any, request_arguments: dict[str, Any], says: str
) -> None:
    """HTTP 400, with and without an image. No other processor argument is accepted."""
    for images in (image(0), []):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(server, images, "what? ", **request_arguments)
        assert caught.value.status_code == 400 and says in str(caught.value)
    check(ask(server, image(0), "what? "), reference, image(0), "what? ", None)


def test_repeated_profiles_hit_the_cache(server: Server) -> None:

    def hits(**request_arguments: Any) -> float:
        before = sum(server.counted("vllm:mm_cache_hits_total").values())
        ask(server, image(900), "again? ", **request_arguments)
        return sum(server.counted("vllm:mm_cache_hits_total").values()) - before

    assert [hits(), hits(model="tiny:fast"), hits(model="tiny:ocr")] == [0, 0, 0]
    repeated = {"override": {"profile": "fast"}}, {"override": {"profile": "default"}}, {"model": "tiny:ocr"}
    assert [hits(**request_arguments) for request_arguments in repeated] == [1, 1, 1]


def test_the_profile_follows_the_load(server: Server) -> None:
    """Load selects the profile of requests that choose none. Streams that ended or were dropped do not count."""
    unloaded = ask(server, image(1), "how many? ").usage.prompt_tokens
    more: dict[str, Any] = {"max_tokens": slow_steps.LONG, "extra_body": {"ignore_eos": True}}
    more["messages"] = [{"role": "user", "content": "go on "}]

    def added(**request_arguments: Any) -> int:
        return ask(server, image(1), "how many? ", **request_arguments).usage.prompt_tokens - unloaded

    streams = []
    step = {}
    for profile in ("half", "fast"):
        streams.append(server.client.chat.completions.create(model="tiny", stream=True, **more))
        next(iter(streams[-1]))
        assert added() == NUM_KEPT[profile] - NUM_KEPT["default"]
        step[profile] = server.counted("tokenprune:overload_step")['model_name="tiny"']
    assert step == {"half": 1, "fast": 2}
    assert added(override={"profile": "default"}) == 0
    assert added(model="tiny:half") == NUM_KEPT["half"] - NUM_KEPT["default"]
    for stream in streams:
        stream.close()
    end = time.monotonic() + CALL
    while added() != 0:
        assert time.monotonic() < end, server.story("dropped streams still count")
        time.sleep(0.1)
    assert server.counted("tokenprune:overload_step")['model_name="tiny"'] == 0


def test_hostile_requests(server: Server, reference: Any) -> None:
    draw, models = random.Random(1), ["tiny", *(f"tiny:{profile}" for profile in [*PROFILES, "fsat"])]
    names = [*map(json.dumps, [*PROFILES, "x" * 10**5]), "1e400", "[" * 3000 + "]" * 3000, "null", "{}"]
    names += ['"\\ud800"', '"\\u0000"']
    settings = [draw_setting(draw) for _ in range(12)] + [f'{{"profile": {setting}}}' for setting in names]
    answered = [post_setting(server, setting, draw.choice(models)) for setting in settings]
    assert set(answered) == {200, 400}, dict(zip(settings, answered, strict=True))
    check(ask(server, image(0), "what? "), reference, image(0), "what? ", None)


def test_profiles_are_counted(server: Server) -> None:
    """Runs last, after the requests of the other tests."""

    def risen(name: str) -> set[str]:
        return {labels for labels, value in server.counted(name).items() if value}

    named = [(by, profile) for by in ("name", "key") for profile in PROFILES]
    sources = [*named, ("key", "default"), ("default", "default"), ("load", "half"), ("load", "fast")]
    assert risen("tokenprune:requests_total") == {
        f'by="{by}",model_name="tiny",profile="{profile}"' for by, profile in sources
    }
    assert risen("tokenprune:refusals_total") == {
        f'model_name="tiny",reason="{reason}"' for reason in ("profile", "setting")
    }
    settings = {("divprune", "0.25"), ("divprune", "0.5"), ("divprune", "0.11"), ("off", "1")}
    assert set(server.counted("tokenprune:visual_tokens_total")) == {
        f'keep="{keep}",method="{method}",model_name="tiny",stage="{stage}"'
        for method, keep in settings
        for stage in ("in", "out")
    }
    selected = server.counted("tokenprune:selections_total")
    seconds = server.counted("tokenprune:selection_seconds_total")
    assert set(selected) == set(seconds) == {'method="divprune",model_name="tiny"'}
    assert 3 <= sum(selected.values()) < 60 and 0 < sum(seconds.values()) < CALL


def test_log_matches_the_counters(server: Server) -> None:
    lines = server.events()
    requests = [line for line in lines if line["event"] == "request"]
    for profile in [*PROFILES, "default"]:
        count = sum(
            value
            for labels, value in server.counted("tokenprune:requests_total").items()
            if f'profile="{profile}"' in labels
        )
        of_profile = [line for line in requests if line["profile"] == profile]
        assert len(of_profile) == count and {line["tokens_out"] for line in of_profile if line["images"] == 1} == {
            NUM_KEPT[profile]
        }
    request_ids = {line["request"] for line in requests}
    for request_id in (line["request"] for line in lines if line["event"] == "selection"):
        assert request_id in request_ids or re.sub(r"_\d+$", "", request_id) in request_ids  # the suffix of a batch
    time.sleep(1.5)  # workers write their counts once a second
    for event, name in (("refusal", "refusals"), ("selection", "selections")):
        assert sum(line["event"] == event for line in lines) == sum(server.counted(f"tokenprune:{name}_total").values())
    assert "profile" not in {key for line in lines if line["event"] == "refusal" for key in line}


def test_check_reports_the_plugin(server: Server) -> None:
    """The check reads the header of an answer, because requests cannot choose here."""
    result = serve_check.check(serve_check.RemoteServer(server.url, timeout=CALL))
    assert result.code == 0 and "is loaded, setting divprune 0.25, profiles half, fast, ocr" in result.lines[0]
    assert re.search(r"An image is pruned: (\d+) -> (\d+) visual tokens \(header divprune;keep=0.25;", result.lines[1])
