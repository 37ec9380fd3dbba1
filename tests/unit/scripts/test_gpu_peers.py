# SPDX-License-Identifier: Apache-2.0
"""The table of peers accounts for its clients, tokens and times correctly, without vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields, separators=(",", ":")).encode()


TOKEN = event(choices=[{"delta": {"content": 'an "error"'}}])
USAGE = event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 3})


def test_a_streamed_answer_has_times_and_tokens(script: Any) -> None:
    load = script("vllm_kit.clients")
    reader = load.Reader(sent=1.0)
    for now, line in enumerate([b"", TOKEN, b": ping", TOKEN, TOKEN, USAGE, b"data: [DONE]"], 2):
        reader.feed(line, float(now))
    assert reader.answer(3) == load.Answer(sent=1.0, first=3.0, last=6.0, prompt=9, tokens=3)
    with pytest.raises(RuntimeError, match="3 tokens instead of 4"):
        reader.answer(4)
    with pytest.raises(RuntimeError, match="no room"):
        reader.feed(event(error={"message": "no room"}), 9.0)
    with pytest.raises(RuntimeError, match="0 tokens instead of 4"):
        load.Reader(sent=0.0).answer(4)


def test_percentiles_are_values_of_the_list(script: Any) -> None:
    percentile = script("vllm_kit.clients").percentile
    values = [float(value) for value in range(100, 0, -1)]
    assert [percentile(values, share) for share in (0.5, 0.99, 1.0, 0.0)] == [50.0, 99.0, 100.0, 1.0]
    assert percentile([3.0], 0.99) == 3.0 and percentile([1.0, 2.0], 0.5) == 1.0


def test_throughput_counts_from_the_first_request_to_the_last_token(script: Any) -> None:
    load = script("vllm_kit.clients")
    answers = [load.Answer(10.0, 11.0, 13.0, 100, 5), load.Answer(12.0, 15.0, 20.0, 101, 11)]
    row = load.summarize(answers)
    assert (row["requests"], row["rate"], row["token_rate"]) == (2, 0.2, 1.6)
    assert (row["first_p50_ms"], row["first_p99_ms"]) == (1000, 3000)
    assert (row["step_p50_ms"], row["step_p99_ms"]) == (500, 500)


def test_the_stages_of_the_server_are_means_between_two_readings(script: Any) -> None:
    load = script("vllm_kit.clients")

    def page(seconds: float, count: int) -> str:
        return "\n".join(
            f'{name}_sum{{engine="{engine}"}} {seconds}\n{name}_count{{engine="{engine}"}} {count}\n'
            f'{name}_bucket{{le="1"}} 7'
            for name in load.STAGES.values()
            for engine in "01"
        )

    assert load.mean_stages(page(1.0, 2), page(4.0, 4)) == dict.fromkeys(load.STAGES, 1500.0)
    assert load.mean_stages(page(1.0, 2), page(1.0, 2)) == dict.fromkeys(load.STAGES, 0.0)


def test_requests_name_the_video_or_send_it(script: Any) -> None:
    build = script("vllm_kit.clients").build_body
    new, known = json.loads(build("clip:evs-0.5", 4, b"mp4", "id")), json.loads(build("clip", 4, None, "id"))
    video, text = new["messages"][0]["content"]
    assert video == {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,bXA0"}, "uuid": "id"}
    assert known["messages"][0]["content"] == [{"type": "video_url", "video_url": None, "uuid": "id"}, text]
    assert "uuid" not in json.loads(build("clip", 4, b"mp4", None))["messages"][0]["content"][0]
    assert (new["model"], new["max_tokens"], new["ignore_eos"]) == ("clip:evs-0.5", 4, True)


def test_each_setting_has_a_server_with_its_options(script: Any, tmp_path: Path) -> None:
    peers, servers = script("j_peers"), script("vllm_kit.servers")
    settings = {setting: (server, model) for setting, server, model in peers.list_settings()}
    assert next(iter(settings)) == "off" and settings["divprune 0.25"] == ("plugin", "clip:divprune-0.25")
    assert settings["vLLM vidcom2"] == ("vLLM vidcom2", "clip") and len(settings) == 7
    for name, (server, model) in settings.items():
        peer = peers.PEERS[server]
        command = servers.build_command(
            tmp_path / "model", peer.options, peer.profiles, 80, False, kv_gib=2, length=99, fps=3
        )
        assert model in command[command.index("--served-model-name") :], name
        assert command[command.index("--kv-cache-memory-bytes") + 1] == str(2 * 2**30)
        assert ("--video-pruning-rate" in command) == name.startswith("vLLM")
        if peer.profiles:
            setting = json.loads(command[command.index("--mm-processor-kwargs") + 1])["tokenprune"]
            assert setting["profiles"]["divprune-0.25"] == {"method": "divprune", "keep": 0.25}
    tiny = servers.build_command(tmp_path / "model", {}, None, 80, True, length=99, fps=3)
    assert "--enforce-eager" in tiny and "True" not in tiny and "--kv-cache-memory-bytes" not in tiny


def test_rows_are_compared_with_the_unpatched_server(script: Any, tmp_path: Path) -> None:
    peers, kit = script("j_peers"), script("kit")
    argv = ["--tiny", "--device", "cpu", "--out", str(tmp_path)]
    sheet = kit.Sheet("j_peers", "Video", "2 B", peers.COLUMNS, "", argv)
    bench = peers.Bench(sheet, {}, b"")
    assert "over_off" not in bench.compare({"rate": 1.0}, "new", 2)
    sheet.take(("new", 2, "off"), lambda: {"clips": "new", "rate": 2.0, "engine_rate": 4.0})
    row = bench.compare({"rate": 1.0, "engine_rate": 6.0}, "new", 2)
    assert (row["over_off"], row["engine_over_off"]) == (0.5, 1.5)
    assert "over_off" not in bench.compare({"rate": 1.0}, "same", 2)
    assert bench.compare({"rate": 1.0}, "new", 2) == {"rate": 1.0, "over_off": 0.5}


def test_the_order_covers_the_protocol_and_states_its_expectations(script: Any) -> None:
    peers = script("j_peers")
    assert sorted(peers.ORDER) == sorted((clips, count) for clips in ("new", "same") for count in peers.PUBLISHED)
    assert "6.424 unpatched, 2.958 EVS, over off 0.46" in peers.describe_expected("same", 32)
    assert all(peers.describe_expected(*key) for key in peers.TINY_ORDER)
