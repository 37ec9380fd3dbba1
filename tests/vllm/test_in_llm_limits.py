# SPDX-License-Identifier: Apache-2.0
"""Cuts inside the decoder: unsupported settings, methods and server options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conftest import OPTIONS
from runner import IN_LLM
from tokenprune.errors import OptionError, UnsupportedModelError, UnsupportedSetupError
from tokenprune.integrations.vllm.compat import missing_hooks
from tokenprune.integrations.vllm.in_llm import limits
from tokenprune.integrations.vllm.settings.items import count_kept, get_cache_key
from tokenprune.integrations.vllm.settings.parse import check_method, check_override, parse_setting
from tokenprune.methods.in_llm.fastv import FastV
from tokenprune.selection.method import Selection
from tokenprune.selection.tokens import VisualTokens

pytestmark = IN_LLM
DART = {"method": "dart", "keep": 0.25, "pivot_text": 0, "experimental_in_llm": True}
FREE = {"experimental_free_kv": True}
FASTV = {"method": "fastv", "keep": 0.25, "experimental_in_llm": True}


def test_settings() -> None:
    setting = parse_setting(DART)
    assert setting.in_llm and setting.keeps_all_tokens and count_kept(setting, 100) == 100
    assert parse_setting(setting.to_json()) == setting and get_cache_key(setting)["experimental_in_llm"] is True
    with pytest.raises(OptionError, match='"experimental_in_llm": true allows it'):
        parse_setting({key: value for key, value in DART.items() if key != "experimental_in_llm"})
    with pytest.raises(OptionError, match=r"Leave experimental_in_llm out"):
        parse_setting({"method": "divprune", "experimental_in_llm": True})
    with pytest.raises(OptionError, match="must be true or false, not 1"):
        parse_setting(DART | {"experimental_in_llm": 1})


class TwoCuts(FastV):
    def stages(self, budget: Any, layers: int) -> list[Any]:
        return [(self, budget), (self, budget)]


class Unlike(FastV):
    """Reads the text after an image, and declares that it does not."""

    query_aware = False


class Merging(FastV):
    def select(self, tokens: VisualTokens) -> Selection:
        kept = super().select(tokens)
        return replace(kept, assign=torch.where(kept.keep, torch.arange(kept.keep.shape[1]), -1))


class Greedy(FastV):
    def select(self, tokens: VisualTokens) -> Selection:
        return Selection(tokens.mask)


class Ahead(FastV):
    needs = frozenset({"next_row_attention"})


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (TwoCuts(), "cuts at several layers"),
        (Unlike(), "query_aware must be True"),
        (Merging(), "it merges tokens"),
        (Greedy(), "instead of"),
        (Ahead(), "needs next_row_attention"),
    ],
)
def test_unsupported_methods_raise(method: Any, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        check_method(method, in_llm=True)


def test_requests_can_only_switch_it_off() -> None:
    server, other = parse_setting(DART), parse_setting({"method": "divprune"})
    for request in ({}, {"keep": 0.25}, {"off": True}, DART):
        check_override(server, parse_setting(DART, request))
    for request in ({"keep": 0.5}, {"pivot_image": 5}, {"method": "divprune"}, FASTV):
        with pytest.raises(OptionError, match="set for the whole server"):
            check_override(server, parse_setting(DART, request))
    with pytest.raises(OptionError, match="set for the whole server"):
        check_override(other, parse_setting({"method": "divprune"}, FASTV))
    check_override(other, parse_setting({"method": "divprune"}, {"method": "pool"}))


def engine_config(folder: Path, setting: Any, **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    options = {"disable_chunked_mm_input": True} | options
    return EngineArgs(
        str(folder), mm_processor_kwargs={"tokenprune": setting}, **OPTIONS | options
    ).create_engine_config()


@pytest.fixture(scope="module")
def supported_config(folder: Any) -> Any:
    return engine_config(folder("llava_deep"), DART)


def test_all_hooks_exist() -> None:
    assert missing_hooks("in_llm_engine", "in_llm_worker", "free_kv") == []


def test_supported_server_gets_the_scheduler(supported_config: Any) -> None:
    from tokenprune.integrations.vllm.in_llm.scheduler import InLLMScheduler

    assert supported_config.scheduler_config.get_scheduler_cls() is InLLMScheduler
    limits.check_engine(supported_config, parse_setting(DART))
    assert limits.SCHEDULERS[True].endswith("AsyncInLLMScheduler")


@pytest.mark.parametrize(
    ("setting", "options", "says"),
    [
        (DART, {"enforce_eager": False}, "--enforce-eager"),
        (DART, {"disable_chunked_mm_input": False}, "--disable-chunked-mm-input"),
        (DART, {"enable_lora": True}, "LoRA"),
        (DART | {"pivot_text": 4}, {}, "--no-enable-prefix-caching, or set pivot_text to 0(.|\n)*no-enable-chunked"),
        (FASTV, {}, "--no-enable-prefix-caching\n.*--no-enable-chunked-prefill"),
        (DART | {"layer": 4}, {}, "layer=4 for this model: choose a layer from 1 to 3"),
        (DART, {"tensor_parallel_size": 2}, "--tensor-parallel-size"),
        (DART | FREE, {"disable_hybrid_kv_cache_manager": True}, "leave out --disable-hybrid-kv-cache-manager"),
        (DART | FREE, {"mm_processor_cache_type": "shm"}, "leave out --mm-processor-cache-type shm"),
        (DART, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "--speculative-config"),
    ],
)
def test_unsupported_options_stop_the_server(folder: Any, setting: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedSetupError, match=says):
        engine_config(folder("llava_deep"), setting, **options)


@pytest.mark.parametrize(
    ("part", "name", "value", "says"),
    [
        ("parallel_config", "pipeline_parallel_size", 2, "--pipeline-parallel-size"),
        ("parallel_config", "data_parallel_size", 2, "--data-parallel-size"),
        ("parallel_config", "decode_context_parallel_size", 2, "--decode-context-parallel-size"),
        ("parallel_config", "enable_dbo", True, "--enable-dbo"),
        ("parallel_config", "ubatch_size", 2, "--ubatch-size"),
        ("", "kv_transfer_config", object(), "--kv-transfer-config"),
        ("cache_config", "kv_offloading_size", 1.0, "--kv-offloading-size"),
        ("", "ec_transfer_config", object(), "--ec-transfer-config"),
        ("cache_config", "kv_sharing_fast_prefill", True, "--kv-sharing-fast-prefill"),
        ("cache_config", "prefix_match_unit", 16, "--prefix-match-unit"),
        ("scheduler_config", "long_prefill_token_threshold", 64, "--long-prefill-token-threshold"),
        ("scheduler_config", "scheduler_cls", "some.Scheduler", "--scheduler-cls"),
        ("model_config", "enable_prompt_embeds", True, "--enable-prompt-embeds"),
        ("model_config", "runner_type", "pooling", "use --runner generate"),
        ("", "kv_events_config", SimpleNamespace(enable_kv_cache_events=True), "--kv-events-config"),
        ("cache_config", "kv_cache_dtype_skip_layers", ["0"], "--kv-cache-dtype-skip-layers"),
    ],
)
def test_unsupported_options_raise(
    supported_config: Any, monkeypatch: Any, part: str, name: str, value: Any, says: str
) -> None:
    """Options that vLLM's CPU build does not accept."""
    monkeypatch.setattr(getattr(supported_config, part) if part else supported_config, name, value)
    with pytest.raises(UnsupportedSetupError, match=says):
        limits.check_engine(supported_config, parse_setting(DART), free_kv=True)


def test_other_model_runner_raises(supported_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # vLLM reads its environment once in a process.
    monkeypatch.setattr(type(supported_config), "use_v2_model_runner", True)
    with pytest.raises(UnsupportedSetupError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        limits.check_engine(supported_config, parse_setting(DART))


def test_other_families_raise(folder: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="does not support Gemma3ForConditionalGeneration, only llava"):
        engine_config(folder("gemma3"), DART)
    with pytest.raises(UnsupportedSetupError, match="choose a layer from 3 to 4"):
        engine_config(folder("qwen3_vl_deep"), DART, max_num_batched_tokens=1200)


def test_sliding_windows_raise() -> None:
    def decoder(**changes: Any) -> Any:
        attention = SimpleNamespace(
            layer_name="0", sliding_window=None, kv_sharing_target_layer_name=None,
            attn_backend=SimpleNamespace(get_name=lambda: changes.get("backend", "CPU_ATTN")),
        )  # fmt: skip
        vars(attention).update({key: value for key, value in changes.items() if key != "backend"})
        return SimpleNamespace(layers=[SimpleNamespace(self_attn=SimpleNamespace(attn=attention))])

    limits.check_layers(decoder())
    for change in ({"sliding_window": 512}, {"kv_sharing_target_layer_name": "1"}):
        with pytest.raises(UnsupportedModelError, match="sliding window or shares"):
            limits.check_layers(decoder(**change))
    with pytest.raises(UnsupportedSetupError, match=r"FLASHINFER\. Start with --attention-backend FLASH_ATTN or"):
        limits.check_layers(decoder(backend="FLASHINFER"))
    with pytest.raises(UnsupportedModelError, match=r"lacks self_attn\.attn"):
        limits.check_layers(SimpleNamespace(layers=[SimpleNamespace()]))
