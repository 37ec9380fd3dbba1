# SPDX-License-Identifier: Apache-2.0
"""`tokenprune bench --backend vllm` on the shipped model; see test_server.py for a server."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import count_items, stop
from tokenprune.errors import TokenPruneError, UnknownMethodError
from tokenprune.integrations.hf import compat
from tokenprune.settings import Setting
from tokenprune_bench import results, tables
from tokenprune_bench.backend import BenchBackend, HfBackend
from tokenprune_bench.json_lines import read_lines
from tokenprune_bench.profiling.model import load_model
from tokenprune_bench.run_folder import PREDICTIONS, RunFolder, config_of
from tokenprune_bench.suite import Bench, BenchPlan
from tokenprune_bench.tuning import Evaluator, Promise, Tuner, Tuning, build_grid
from tokenprune_bench.vllm_backend import Chat, VllmBackend
from tokenprune_bench.vllm_offline import OfflineEngine
from tokenprune_demo.heldout import load_heldout

PLAN = BenchPlan(methods=("uniform", "divprune", "pool", "fastv"), keeps=(0.25,), images=2, batch_size=8, repeats=0)
SERVED = ("uniform", "divprune", "pool")
ARGUMENTS = dict(enforce_eager=True, max_model_len=512, max_num_seqs=8, block_size=32)


@pytest.fixture(scope="module")
def engine() -> Iterator[OfflineEngine]:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    stop()
    offline_engine = OfflineEngine(None, arguments=ARGUMENTS)
    yield offline_engine
    offline_engine.close()
    del offline_engine.llm
    gc.collect()
    cleanup_dist_env_and_memory()


@pytest.fixture
def encoded(engine: OfflineEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of items in each call of the encoder."""
    model = engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    return count_items(model, monkeypatch)


class Counting(HfBackend):
    """transformers with consecutive positions of the kept tokens, as in vLLM with one axis of positions."""

    @contextmanager
    def answering(self, setting: Any) -> Iterator[Any]:
        def count(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple:
            length, keys = kwargs["inputs_embeds"].shape[1], compat.get_cache(kwargs).layers[0].keys
            past = 0 if length > 1 else keys.shape[-2]
            return args, kwargs | {"position_ids": past + torch.arange(length)[None]}

        with super().answering(setting) as answer:
            hook = self.subject.adapter.decoder.register_forward_pre_hook(count, with_kwargs=True)
            try:
                yield answer
            finally:
                hook.remove()


def run(backend: BenchBackend, plan: BenchPlan, folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the records of a run by method, and its predictions."""
    with RunFolder(folder, config_of(backend, plan, "exact", {})) as run_folder:
        records = list(Bench(backend, plan, folder=run_folder).records())
    by_method = {record.get("method"): record for record in records}
    return by_method, [line for line, _ in read_lines(folder / PREDICTIONS)]


def test_answers_and_cost_are_those_of_transformers(engine: OfflineEngine, tmp_path: Path) -> None:
    vllm_records, answers = run(VllmBackend(engine, "", 4), PLAN, tmp_path / "vllm")
    # One question at a time, because the cache of a padded batch includes the padding.
    plan = BenchPlan(methods=PLAN.methods, keeps=PLAN.keeps, images=PLAN.images, batch_size=1, repeats=0)
    hf_records, expected = run(Counting(load_model(device="cpu")), plan, tmp_path / "hf")

    def list_predictions(lines: list[dict[str, Any]], method: str) -> list[str]:
        return [line["prediction"] for line in lines if line["method"] == method]

    assert len(set(list_predictions(answers, "unpatched"))) > 5 and list_predictions(
        answers, "uniform"
    ) != list_predictions(answers, "unpatched")
    for name in ("unpatched", *SERVED):
        assert list_predictions(answers, name) == list_predictions(expected, name)
        record, expected_record = vllm_records[name], hf_records[name]
        for key in ("right", "correct", "n", "site", "seeds", "questions"):
            assert record[key] == expected_record[key]
        for key, value in expected_record["stats"].items():
            if key == "overhead_ms":
                assert record["stats"][key] is None
            elif key == "kv_bytes_full" and name == "unpatched":
                continue  # left-padded in a batch
            else:
                assert record["stats"][key] == pytest.approx(value), key
    assert len(vllm_records["random"]["right"]) == 3 and vllm_records["random"]["stats"]["keep_ratio"] == 0.25
    for name in ("downsample", "fastv"):
        assert vllm_records[name]["record"] == "skipped" and "cannot be served" in vllm_records[name]["reason"]
    header = vllm_records[None]
    assert header["environment"]["vllm"] and header["environment"]["dtype"] == "float32"
    notes = " ".join(
        tables.build_tables(results.summarise([header, *(vllm_records[k] for k in vllm_records if k)]))[0].notes
    )
    assert "closed form, from the length of the prompt that vLLM reports" in notes and "Skipped fastv" in notes
    assert str(Path.cwd()) not in str(header) and "/" not in header["environment"]["model"]


def test_the_tuner_finds_what_it_finds_with_transformers(engine: OfflineEngine) -> None:
    questions, candidates = load_heldout(limit=5), build_grid(["uniform", "pool"], [0.5, 0.25])

    def tune(backend: BenchBackend, batch_size: int) -> Tuning:
        panel = Evaluator(backend, questions, batch_size=batch_size)
        return Tuner(panel, candidates, Promise(0.45), objective="flops", repeats=1).run()

    vllm_tuning, hf_tuning = tune(VllmBackend(engine, "", 4), 8), tune(Counting(load_model(device="cpu")), 1)
    for trial, expected in zip(vllm_tuning.trials, hf_tuning.trials, strict=True):
        assert (trial.state, trial.search, trial.held_out, trial.drop) == (
            expected.state,
            16,
            expected.held_out,
            expected.drop,
        )
        for name in ("keep_ratio", "prefill_flops_ratio", "kv_bytes"):
            assert trial.cost[name] == pytest.approx(expected.cost[name])
    assert vllm_tuning.choice is not None and any(trial.drop for trial in vllm_tuning.trials)


def test_prompts_are_those_of_transformers(engine: OfflineEngine) -> None:
    """The prompts start with the BOS token, which vLLM's chats leave to the template."""
    subject, (question, *_) = load_model(device="cpu"), load_heldout(limit=1)
    ids = subject.inputs([question.images], [question.question])["input_ids"][0].tolist()
    assert ids[0] == subject.processor.tokenizer.bos_token_id
    (reply,) = engine.ask([Chat(question.images, question.question)], {"off": True}, 1)
    assert reply.prompt_tokens == len(ids)


def test_timed_requests_find_no_cache(engine: OfflineEngine, encoded: list[int]) -> None:
    backend, question = VllmBackend(engine, "", 4), load_heldout(limit=1)[0]
    timing = backend.timing(Setting.from_text("pool", 0.25), question, 2)
    assert len(encoded) == 6  # three rounds of two requests
    assert timing["repeats"] == 2 and timing["rows"] == 1
    for name in ("ttft_ms", "ttft_ms_unpatched", "token_ms", "token_ms_unpatched", "ttft_ratio", "token_ratio"):
        assert 0 < timing[name]["p20"] <= timing[name]["p50"] <= timing[name]["p80"]
    assert timing["token_ms"]["p50"] < timing["ttft_ms"]["p50"]
    chat = Chat(question.images, question.question)
    for _ in range(2):
        engine.ask([chat], {"method": "uniform", "keep": 3}, 1)
    assert len(encoded) == 7  # the same image is in the cache


def test_what_an_engine_refuses_is_said(engine: OfflineEngine) -> None:
    images = load_heldout(limit=1)[0].images
    with pytest.raises(TokenPruneError, match=r"vLLM rejected a request: .*512"):
        engine.ask([Chat(images, "what " * 600)], {"off": True}, 1)
    with pytest.raises(UnknownMethodError, match="did you mean 'divprune'"):
        engine.ask([Chat(images, "what")], {"method": "divprun"}, 1)


def test_an_engine_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(TokenPruneError, match=r"vLLM cannot serve .*no_such_argument"):
        OfflineEngine(None, arguments={"no_such_argument": 1})
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TokenPruneError, match=f"vLLM cannot serve {tmp_path.name}: "):
        OfflineEngine(str(tmp_path))
