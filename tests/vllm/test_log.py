# SPDX-License-Identifier: Apache-2.0
"""The log of requests and selections, without a server; test_profiles.py tests the log of a server."""

from __future__ import annotations

import json
import logging
import logging.config
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpoints import CHECKPOINTS
from conftest import DIVPRUNE, Engine
from front_end import FrontEnd, config
from tokenprune.errors import OptionError, TokenPruneError
from tokenprune.integrations.vllm import log
from tokenprune.integrations.vllm.settings.configuration import METRICS_FOLDER
from tokenprune.integrations.vllm.worker.clock import Clock

SETTING = DIVPRUNE | {"profiles": {"fast": {"keep": 0.11}, "ocr": {"off": True}}, "methods": ["divprune", "downsample"]}
CPU = torch.device("cpu")


def read_events(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Return the events that were logged since the last call, without their times."""
    events = [json.loads(record.getMessage()) for record in caplog.records if record.name == log.NAME]
    assert [record.tokenprune for record in caplog.records if record.name == log.NAME] == events
    caplog.clear()
    for event in events:
        assert datetime.fromisoformat(event.pop("time")).utcoffset() is not None
    return events


def test_requests_and_refusals(folder: Callable[[str], Path], caplog: pytest.LogCaptureFixture) -> None:
    """One line per request or refusal, the same for cached images, and no line while memory is measured."""
    front = FrontEnd(folder, "qwen2_5_vl", SETTING | {"log": "json"}, "logging")
    ask = front.count
    read_events(caplog)
    front.processor.get_dummy_mm_inputs({"image": 1})
    assert read_events(caplog) == []
    full = {count: ask(count, {"profile": "ocr"}) for count in (1, 2)}
    assert read_events(caplog) == [
        {"event": "request", "profile": "ocr", "by": "key", "method": "off", "keep": 1.0, "images": count, "videos": 0,
         "tokens_in": full[count], "tokens_out": full[count]}
        for count in (1, 2)
    ]  # fmt: skip
    cases = [(None, "default", 0.25), ({"profile": "fast"}, "fast", 0.11), ({"keep": 5}, "request", 5)]
    for override, profile, keep in 2 * cases:
        by = "default" if override is None else "key"
        num_kept = ask(2, override)
        assert read_events(caplog) == [
            {"event": "request", "profile": profile, "by": by, "method": "divprune", "keep": keep,
             "images": 2, "videos": 0, "tokens_in": full[2], "tokens_out": num_kept}
        ]  # fmt: skip
    ask(1, {"method": ["downsample", "divprune"], "keep": [0.5, 0.5]})
    (line,) = read_events(caplog)
    assert (line["method"], line["keep"]) == ("downsample+divprune", 0.25)
    assert line["tokens_in"] == full[1] > line["tokens_out"]

    secret = "/etc/passwd my\nquestion"
    refused = [({"profile": secret}, "profile"), ({"method": "uniform"}, "limit"), ({"method": secret}, "setting")]
    for override, reason in refused:
        with pytest.raises(TokenPruneError):
            ask(1, override)
        assert read_events(caplog) == [{"event": "refusal", "reason": reason}]
    with pytest.raises(OptionError):
        ask(1, prompt=front.checkpoint.prompt(2))
    assert read_events(caplog) == [{"event": "refusal", "reason": "input"}]


def test_log_is_off_by_default(folder: Callable[[str], Path], caplog: pytest.LogCaptureFixture) -> None:
    front = FrontEnd(folder, "qwen2_5_vl", SETTING)
    front.ask(1)
    with pytest.raises(OptionError, match="does not exist"):
        front.ask(1, {"profile": "fsat"})
    with Clock.from_config(create_worker_config(front.model_config)).timing("divprune", CPU):
        pass
    assert read_events(caplog) == []


def test_bad_values_stop_the_server(folder: Callable[[str], Path]) -> None:
    for value in ("xml", True, ["json"], None):
        with pytest.raises(ValueError, match='log must be "json", or left out'):
            config(folder("llava"), DIVPRUNE | {"log": value})
    with pytest.raises(ValueError, match=r"profile 'fast': .*log"):
        config(folder("llava"), DIVPRUNE | {"profiles": {"fast": {"keep": 0.11, "log": "json"}}})


def create_worker_config(model_config: Any, rank: int = 0) -> Any:
    return SimpleNamespace(model_config=model_config, parallel_config=SimpleNamespace(rank=rank))


def test_selections(folder: Callable[[str], Path], caplog: pytest.LogCaptureFixture) -> None:
    model_config = config(folder("llava"), {"off": True, "log": "json"})
    seconds = Path(getattr(model_config.multimodal_config, METRICS_FOLDER))
    item = {"keep": 0.25, "modality": "video", "tokens_in": 36, "tokens_out": 9}
    for rank, folder_path in ((0, seconds), (0, seconds / "elsewhere"), (1, seconds)):
        setattr(model_config.multimodal_config, METRICS_FOLDER, str(folder_path))
        read_events(caplog)
        with Clock.from_config(create_worker_config(model_config, rank)).timing("evs", CPU, item):
            torch.zeros(9)
        events = read_events(caplog)
        if rank:
            assert events == []
        else:
            assert 0 <= events[0].pop("ms") < 1000
            assert events == [{"event": "selection", "method": "evs"} | item]
    (file,) = seconds.iterdir()
    assert json.loads(file.read_bytes())["evs"][1] == 1


@pytest.mark.parametrize(
    ("in_engine", "request_id"),
    [
        ("chatcmpl-9ba953e5593f4a64-0a1b2c3d", "9ba953e5593f4a64"),
        ("1_chatcmpl-mine.1-0a1b2c3d", "mine.1"),  # the second of two answers
        ("chatcmpl-3_mine-deadbeef-0a1b2c3d", "3_mine-deadbeef"),
        ("resp_12-0a1b2c3d", "resp_12"),
        ("chatcmpl-my secret-0a1b2c3d", "unreadable"),
        ("chatcmpl--0a1b2c3d", "unreadable"),
        ("7", "7"),
    ],
)
def test_a_selection_has_the_id_of_its_request(in_engine: str, request_id: str) -> None:
    assert log.get_request_id(in_engine) == request_id


@pytest.mark.parametrize("name", ["qwen2_5_vl", "llava_onevision"])
def test_selections_name_their_requests(
    start: Callable[..., Engine], caplog: pytest.LogCaptureFixture, name: str
) -> None:
    engine, checkpoint = start(name, DIVPRUNE | {"log": "json"}), CHECKPOINTS[name]
    read_events(caplog)
    new_images = iter([checkpoint.images(1, seed=40 + seed)[0] for seed in range(6)])
    images = [[next(new_images) for _ in range(count)] for count in (1, 3, 2)]
    requests = [
        engine.request(checkpoint.prompt(len(request_images), "what? "), request_images) for request_images in images
    ]
    answers = engine.generate(requests, 1)
    request_ids = [event["request"] for event in read_events(caplog) if event["event"] == "selection"]
    assert sorted(request_ids) == sorted(
        answer.request_id for answer, request_images in zip(answers, images, strict=True) for _ in request_images
    )
    engine.generate(requests, 1)
    assert not [event for event in read_events(caplog) if event["event"] == "selection"]


def isolate_logger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep log lines from the handlers that pytest adds to the root logger."""
    monkeypatch.setattr(logging.getLogger("tokenprune"), "propagate", False)
    log._build_stderr_handler.cache_clear()


def test_lines_go_to_stderr_without_a_prefix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    isolate_logger(monkeypatch)
    log.log_event("request", method="divprune", tokens_in=36)
    out, err = capsys.readouterr()
    assert out == "" and err.endswith("\n") and err.count("\n") == 1
    line = json.loads(err)
    assert set(line) == {"time", "event", "method", "tokens_in"}


def test_operators_configure_the_logger(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The logger can write to a file with a custom format, or be off, as with vLLM's VLLM_LOGGING_CONFIG_PATH."""
    isolate_logger(monkeypatch)
    above = logging.getLogger("tokenprune")
    file = {"class": "logging.FileHandler", "filename": str(tmp_path / "log"), "formatter": "own"}
    form = {"format": "%(levelname)s %(name)s %(message)s"}
    configured = {"version": 1, "disable_existing_loggers": False, "formatters": {"own": form}}
    try:
        logging.config.dictConfig(
            configured | {"handlers": {"own": file}, "loggers": {"tokenprune": {"handlers": ["own"]}}}
        )
        log.log_event("refusal", reason="limit")
        log.logger.setLevel(logging.WARNING)
        log.log_event("refusal", reason="profile")
    finally:
        log.logger.setLevel(logging.INFO)
        for handler in above.handlers[:]:
            above.removeHandler(handler)
            handler.close()
    level, name, line = (tmp_path / "log").read_text().split(maxsplit=2)
    assert (level, name) == ("INFO", log.NAME) and json.loads(line)["reason"] == "limit"
    assert capsys.readouterr() == ("", "")
