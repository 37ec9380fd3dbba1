# SPDX-License-Identifier: Apache-2.0
"""Test the vLLM backend of the benchmark without vLLM: a made-up engine, and a server that only implements the
protocol. tests/vllm/ tests the actual engine and server."""

from __future__ import annotations

import base64
import io
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from each import each
from pretender import VISUAL, Pretender, Talk, pretending
from tokenprune.cli import app
from tokenprune.errors import OptionError, TokenPruneError
from tokenprune.models.decoder_shape import DecoderShape
from tokenprune.settings import Setting
from tokenprune_bench.errors import DataError, RunError
from tokenprune_bench.json_lines import read_lines
from tokenprune_bench.plan import Pass
from tokenprune_bench.results import summarise
from tokenprune_bench.run_folder import RunFolder, config_of
from tokenprune_bench.suite import Bench, BenchPlan
from tokenprune_bench.tables import build_tables
from tokenprune_bench.vllm_backend import Chat, Reply, VllmBackend, build_request, needs_special_tokens
from tokenprune_bench.vllm_offline import OfflineEngine
from tokenprune_demo.heldout import load_heldout

PLAN = BenchPlan(methods=("uniform", "dart"), keeps=(0.25,), images=1, batch_size=3, repeats=2)
TEXT_CONFIG = SimpleNamespace(
    num_hidden_layers=2, hidden_size=8, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1
)
CONFIG = SimpleNamespace(model_type="made_up", get_text_config=lambda: TEXT_CONFIG)


class Killed(BaseException):
    """An exception like a signal, which no handler catches."""


class MadeUp:
    """An engine that counts calls. Each letter is a token, and the answer is the token count. calls: number of calls
    until it is killed."""

    bytes_per_value = 2

    def __init__(self, calls: int = -1, config: Any = CONFIG) -> None:
        self.config, self.left = config, calls
        self.asked: list[tuple[int, dict[str, Any]]] = []
        self.seen, self.kept = 1000, 500  # other clients sent requests before
        self.clocked: list[tuple[dict[str, Any], bytes]] = []
        self.foreign = 0

    def ask(self, chats: Sequence[Chat], setting: dict[str, Any], max_tokens: int) -> list[Reply]:
        if self.left == len(self.asked):
            raise Killed
        if setting.get("method") == "dart":
            raise OptionError("dart cannot be served\nat all")
        self.asked.append((len(chats), setting))
        kept = round(VISUAL * setting.get("keep", 1))
        self.seen += VISUAL * len(chats) + self.foreign
        self.kept += kept * len(chats) + self.foreign
        return [Reply(f" {len(chat.text)} ", len(chat.text) + kept) for chat in chats]

    def clock(self, chat: Chat, setting: dict[str, Any], tokens: int) -> tuple[float, float]:
        self.clocked.append((setting, chat.images[0].tobytes()))
        return (100.0, 10.0) if setting == {"off": True} else (50.0, 10.0)

    def count_visual_tokens(self) -> tuple[int, int]:
        return self.seen, self.kept

    def check(self, chat: Chat) -> None:
        pass

    def environment(self) -> dict[str, Any]:
        return {"model": "m", "device": "d", "machine": "", "cores": 1, "dtype": "float16", "python": "3", "vllm": "9"}

    def fingerprint(self) -> str:
        return "f"


def run_bench(engine: MadeUp, folder: Path | None = None, plan: BenchPlan = PLAN) -> list[dict[str, Any]]:
    backend = VllmBackend(engine, "!", 4)
    if folder is None:
        return list(Bench(backend, plan).records())
    with RunFolder(folder, config_of(backend, plan, "exact", {})) as run_folder:
        return list(Bench(backend, plan, folder=run_folder).records())


def read_records(folder: Path) -> list[dict[str, Any]]:
    records = [record for name in ("predictions.jsonl", "results.jsonl") for record, _ in read_lines(folder / name)]
    for record in records:
        record.pop("date", None)
        record.get("timing", {}).pop("load", None)
    return records


# -- the backend ------------------------------------------------------------------------------------------------------


def test_records_have_the_format_of_any_backend() -> None:
    engine = MadeUp()
    header, base, random, down, uniform, dart = records = run_bench(engine)
    assert header["environment"] | {"tokenprune": ""} == {
        "engine": "vllm", "vllm": "9", "model": "m", "model_type": "made_up", "weights": None, "device": "d",
        "machine": "", "cores": 1, "threads": None, "dtype": "float16", "attention": None, "python": "3",
        "tokenprune": "",
    }  # fmt: skip
    assert (dart["record"], dart["reason"]) == ("skipped", "dart cannot be served")
    # Eight questions in batches of three, for each seed.
    assert [size for size, _ in engine.asked] == [3, 3, 2] * 6
    assert [record["method"] for record in (base, random, down, uniform)] == [
        "unpatched", "random", "downsample", "uniform",
    ]  # fmt: skip
    shape = DecoderShape.from_config(TEXT_CONFIG)
    unpruned, kept = 8 * VISUAL, 2 * VISUAL
    assert base["stats"]["visual_tokens_per_layer"] == [unpruned, unpruned]
    stats = uniform["stats"]
    assert (stats["visual_tokens_in"], stats["visual_tokens_out"]) == (unpruned, kept)
    assert stats["visual_tokens_per_layer"] == [kept, kept] and stats["keep_ratio"] == 0.25
    letters = [len(question.question) + 1 for question in load_heldout(limit=1)]
    # Keys and values in two layers, a head of 4 channels, two bytes each.
    assert stats["kv_bytes"] == sum([*letters, kept]) * 2 * 2 * 4 * 2
    assert stats["kv_bytes_full"] == base["stats"]["kv_bytes"] == sum([*letters, unpruned]) * 2 * 2 * 4 * 2
    flops = [sum(shape.prefill_flops([text + visual] * 2) for text in letters) for visual in (25, 100)]
    assert len(set(letters)) > 1 and stats["prefill_flops_ratio"] == pytest.approx(flops[0] / flops[1])
    assert stats["overhead_ms"] is None
    (title, *_), table = (build_tables(summarise(records))[0].title,), str(build_tables(summarise(records))[0])
    assert title == ("m: 8 questions on 1 images, d, vLLM 9, float16")
    assert "100 → 25" in table and "with uncached images" in table and "Skipped dart" in table


def test_times_are_taken_in_turns_with_images_of_their_own() -> None:
    engine = MadeUp()
    uniform = run_bench(engine)[4]
    assert uniform["timing"]["ttft_ratio"]["p50"] == 0.5 and uniform["timing"]["token_ratio"]["p50"] == 1.0
    assert len(engine.clocked) == 3 * 2 * 3  # methods that ran, sides and rounds
    assert [("off" in setting) for setting, _ in engine.clocked[:6]] == [False, True, True, False, False, True]
    # Three random bytes per image: two of 18 are equal once in 100,000 runs.
    assert len({pixels for _, pixels in engine.clocked}) == len(engine.clocked)


def test_without_a_config_only_tokens_are_told() -> None:
    records = run_bench(MadeUp(config=None))
    stats = records[4]["stats"]
    assert (stats["visual_tokens_average"], stats["keep_ratio"], stats["prefill_flops_ratio"]) == (200, 0.25, None)
    row = build_tables(summarise(records))[0].rows[-1]
    assert [cell.text for cell in row[2:6]] == ["100 → 25", "25", "", ""]


@pytest.mark.parametrize("calls", [0, 2, 5, 13])
def test_a_killed_run_goes_on(calls: int, tmp_path: Path) -> None:
    run_bench(MadeUp(), tmp_path / "whole")
    with pytest.raises(Killed):
        run_bench(MadeUp(calls), tmp_path / "run")
    engine = MadeUp()
    run_bench(engine, tmp_path / "run")
    assert len(engine.asked) == 18 - calls
    assert read_records(tmp_path / "run") == read_records(tmp_path / "whole")
    with pytest.raises(RunError, match="has a run with model_type"):
        run_bench(MadeUp(config=None), tmp_path / "run")


def test_requests_of_other_clients_are_detected() -> None:
    """Requests of other clients are detected while the unpatched questions run, if they are pruned, and at any time
    after."""
    engine = MadeUp()
    backend = VllmBackend(engine, "", 4)
    backend.begin([])
    bench = Bench(backend, PLAN)
    with backend.answering(None) as answer:
        answer(0, bench.examples[:3])
    engine.foreign = 7
    uniform = Setting.from_text("uniform", 0.25)
    with backend.answering(uniform) as answer, pytest.raises(RunError, match="visual tokens of other requests"):
        answer(0, bench.examples[:3])
    engine.foreign, engine.kept = 0, 0
    plain = MadeUp.ask

    def pruned(self: MadeUp, *args: Any) -> list[Reply]:
        replies = plain(self, *args)
        self.kept -= 1
        return replies

    engine.ask = pruned.__get__(engine)
    with backend.answering(None) as answer, pytest.raises(RunError, match="visual tokens of other requests"):
        answer(3, bench.examples[3:6])


def test_videos_are_refused() -> None:
    video = SimpleNamespace(is_video=True, where="line 3")
    with pytest.raises(DataError, match=r"line 3: is about a video.*--backend hf"):
        VllmBackend(MadeUp(), "", 4).begin([video])


def test_a_request_names_all_options_of_a_setting() -> None:
    assert build_request(None) == {"off": True}
    assert build_request(Pass("unpatched", 1.0).setting) == {"off": True}

    def build(setting: dict) -> dict:
        return build_request(Setting.from_json(setting))

    (one_pass,) = BenchPlan(("random",), seeds=(2,)).passes("random", 0.5)
    assert build_request(one_pass.setting) == {"method": "random", "keep": 0.5, "seed": 2}
    assert build({"method": "vscan", "keep": 64})["stage2"] is True
    assert "thresholds" not in build({"method": "dymu", "keep": 0.5})  # a file, which requests cannot reference
    limit, pool = {"max_visual_tokens": 64}, {"method": "pool", "keep": 0.5}
    assert build(limit) == limit and build(limit | pool) == limit | build(pool)
    stack = {"method": [{"method": "random", "seed": 2}, "pool"], "keep": [0.5, 0.25], "per": "frame"}
    assert build(stack) == {**stack, "method": [{"method": "random", "seed": 2}, build({"method": "pool"})]}


@pytest.mark.parametrize(
    ("plain", "special", "expected"),
    [([5], [1, 5], True), ([1, 5], [1, 1, 5], False), ([5], [5], False), ([1, 5], [1, 5], False)],
)
def test_special_tokens_come_once(plain: list[int], special: list[int], expected: bool) -> None:
    assert needs_special_tokens(lambda add_special: special if add_special else plain) is expected


# -- the command line -------------------------------------------------------------------------------------------------


def invoke_bench(*arguments: str, **environment: str) -> Result:
    return CliRunner(env={"COLUMNS": "300", **environment}).invoke(app, ["bench", *arguments])


@each(
    ("arguments", "expected"),
    [
        ("--backend tgi", "'tgi' is none of hf, vllm"),
        ("--server http://localhost:1", "--server goes with --backend vllm"),
        ("--engine-args {}", "--engine-args goes with --backend vllm"),
        ("--backend vllm --device cpu", "--device is no option of vLLM: use --engine-args"),
        ("--backend vllm --threads 2", "--threads is no option of vLLM: use --engine-args"),
        ("--backend vllm --server http://localhost:1 --dtype float16", "--dtype is no option of a server"),
        ("--backend vllm --server http://localhost:1 --engine-args {}", "--engine-args is no option of a server"),
        ("--backend vllm --engine-args {", "is not valid JSON"),
        ("--backend vllm --engine-args []", "takes an object"),
        ('--backend vllm --engine-args {"model":"x"}', "cannot set model: name it with --model"),
        ('--backend vllm --engine-args {"mm_processor_kwargs":{"tokenprune":{}}}', "benchmark sets methods and keeps"),
        ("--backend vllm --server localhost:8000", "is not an address"),
    ],
)
def test_conflicting_options_of_backends_are_refused(arguments: str, expected: str) -> None:
    if "is not an address" in expected:
        pytest.importorskip("openai", reason="the address is looked at by the client")
    result = invoke_bench(*arguments.split())
    assert result.exit_code == 2 and expected in result.stderr


def test_vllm_shares_the_work_by_itself() -> None:
    result = invoke_bench("--backend", "vllm", WORLD_SIZE="2")
    assert result.exit_code == 2 and "tensor_parallel_size" in result.stderr


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(TokenPruneError, match=r"tokenprune-vlm\[vllm\]"):
        OfflineEngine(None)
    monkeypatch.setitem(sys.modules, "openai", None)
    result = invoke_bench("--backend", "vllm", "--server", "http://127.0.0.1:1")
    assert result.exit_code == 2 and "tokenprune-bench[server]" in result.stderr


# -- a server ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretender]:
    pytest.importorskip("openai", reason="the client of --server: pip install 'tokenprune-bench[server]'")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with pretending() as pretender:
        yield pretender


def ask_server(server: Pretender, *arguments: str) -> Result:
    return invoke_bench(
        "--backend", "vllm", "--server", f"{server.url}/v1", "--methods", "uniform", "--keep", "0.25", "--images", "1",
        "--repeats", "1", *arguments,
    )  # fmt: skip


def test_a_server_is_asked(server: Pretender, tmp_path: Path) -> None:
    options = ("--suffix", "?", "--max-new-tokens", "3", "--model", "one", "--details")
    result = ask_server(server, "--run", str(tmp_path / "run"), *options)
    assert result.exit_code == 0, result.output
    assert "one: 8 questions on 1 images, a vLLM server, vLLM 9.9, unknown dtype" in result.stdout
    assert "100 → 25" in result.stdout and "100 → 100" in result.stdout
    first, unpatched = server.chats[0], server.chats[1:9]
    assert first["max_tokens"] == 1  # checks whether the plugin is installed
    for chat in unpatched:
        assert (chat["model"], chat["temperature"], chat["max_tokens"]) == ("one", 0.0, 3)
        assert chat["mm_processor_kwargs"] == {"tokenprune": {"off": True}} and chat["add_special_tokens"] is True
        (message,) = chat["messages"]
        assert [part["type"] for part in message["content"]] == ["image_url", "text"]
        assert message["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")
    lines = [line for line, _ in read_lines(tmp_path / "run" / "predictions.jsonl")]
    assert all(line["prediction"].endswith("?") for line in lines) and len({line["prediction"] for line in lines}) > 4
    timed = [chat for chat in server.chats if chat.get("stream")]
    assert len(timed) == 3 * 2 * 2 and all(chat["ignore_eos"] and chat["max_tokens"] == 9 for chat in timed)
    for salts in ({chat["cache_salt"] for chat in timed}, {json.dumps(chat["messages"]) for chat in timed}):
        assert len(salts) == len(timed)
    config = (tmp_path / "run" / "config.json").read_text()
    assert "127.0.0.1" not in config and '"vllm": "9.9"' in config


def test_jpeg_files_are_sent_as_they_are(server: Pretender, tmp_path: Path) -> None:
    """So that their decoding counts, at the scale that the setting needs. Timed requests differ after the image."""
    from tokenprune_bench.data import load_data
    from tokenprune_bench.vllm_server import ServerEngine

    for name in ("a.jpg", "a.png"):
        Image.new("RGB", (64, 48), "red").save(tmp_path / name)
    rows = [{"image": name, "question": "what?", "answer": "cat"} for name in ("a.jpg", "a.png")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    engine = ServerEngine(server.url)
    backend, questions = VllmBackend(engine, "", 4), load_data(tmp_path / "rows.jsonl").questions
    setting = Setting.from_json({"max_visual_tokens": 64})
    with backend.answering(setting) as answer:
        answer(0, questions)
    backend.timing(setting, questions[0], 1)
    engine.close()
    first, second, *timed = server.chats
    assert first["mm_processor_kwargs"] == {"tokenprune": {"max_visual_tokens": 64}}
    urls = [
        [chat["messages"][0]["content"][0]["image_url"]["url"] for chat in chats] for chats in ((first, second), timed)
    ]
    content = {kind: data for kind, _, data in (url.partition(";base64,") for url in urls[0])}
    assert base64.b64decode(content["data:image/jpeg"]) == (tmp_path / "a.jpg").read_bytes()
    assert set(content) == {"data:image/jpeg", "data:image/png"} and len(set(urls[1])) == len(urls[1]) >= 4
    with Image.open(io.BytesIO(base64.b64decode(urls[1][0].partition(",")[2]))) as image:
        assert image.convert("RGB").getpixel((5, 5))[0] > 200


def test_questions_of_a_batch_are_asked_at_once(server: Pretender) -> None:
    from tokenprune_bench.vllm_server import ServerEngine

    engine = ServerEngine(server.url)
    server.gate = threading.Barrier(4)  # opens with four requests
    replies = engine.ask([Chat((), f"{index}") for index in range(4)], {"off": True}, 1)
    assert [reply.text for reply in replies] == ["0", "1", "2", "3"]
    # Only this client's requests are counted.
    assert engine.count_visual_tokens() == tuple(server.counts) == (4 * VISUAL, 4 * VISUAL)
    engine.close()


def test_special_tokens_are_left_to_a_template_that_writes_them(server: Pretender) -> None:
    from tokenprune_bench.vllm_server import ServerEngine

    server.bos = True
    engine = ServerEngine(server.url)
    engine.ask([Chat((), "x")], {"off": True}, 1)
    assert server.chats[0]["add_special_tokens"] is False
    engine.close()


def test_a_server_without_the_plugin_is_not_measured(server: Pretender) -> None:
    server.plugin = False
    result = ask_server(server)
    assert result.exit_code == 2 and "without tokenprune's plugin" in result.stderr
    assert "--trust-request-mm-kwargs" in result.stderr and len(server.chats) == 1


@pytest.mark.parametrize(
    ("status", "message", "expected"),
    [
        (400, "disabled by default", "disabled by default. To allow a setting per request, start it with --trust-"),
        (401, "no key", "needs a key. Set OPENAI_API_KEY"),
        (403, "not yours", "failed: Error code: 403"),
    ],
)
def test_refusals_of_a_server_are_reported(server: Pretender, status: int, message: str, expected: str) -> None:
    server.refusal = (status, message)
    result = ask_server(server)
    assert result.exit_code == 2 and expected in result.stderr, result.stderr


def test_a_method_that_the_server_refuses_is_skipped(server: Pretender, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Talk.do_POST

    def refusing(self: Talk) -> None:
        length = int(self.headers["Content-Length"])
        text = self.rfile.read(length)
        self.rfile = io.BytesIO(text)
        if b'"uniform"' in text:
            return self.say(400, json.dumps({"error": {"message": "uniform cannot be served: so it is"}}))
        return plain(self)

    monkeypatch.setattr(Talk, "do_POST", refusing)
    result = ask_server(server, "--repeats", "0", "--details")
    assert result.exit_code == 0 and "Skipped uniform at keep 0.25: uniform cannot be served: so it is" in result.stdout


def test_an_unreachable_server_is_reported(server: Pretender) -> None:
    result = ask_server(server, "--model", "three")
    assert result.exit_code == 2 and "does not serve three. It serves one, two" in result.stderr
    server.shutdown()
    server.server_close()
    result = ask_server(server)
    assert result.exit_code == 2 and "does not answer" in result.stderr and "Check that it runs" in result.stderr
