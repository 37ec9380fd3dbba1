# SPDX-License-Identifier: Apache-2.0
"""Other features of a server: speculative decoding, structured output, LoRA on the language model, shared caches."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from checkpoints import HIDDEN, VOCABULARY, text
from conftest import DIVPRUNE, OPTIONS, Engine, check_same, count_items

BLOCK = 32


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Record the drafts that the scheduler schedules."""
    from vllm.v1.core.sched.scheduler import Scheduler

    drafts: list[list[int]] = []
    schedule = Scheduler.schedule

    def spy(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = schedule(self, *args, **kwargs)
        drafts.extend(output.scheduled_spec_decode_tokens.values())
        return output

    monkeypatch.setattr(Scheduler, "schedule", spy)
    return drafts


# ngram imports numba, and vLLM 0.32 then fails on one of its objects when another engine starts in this process.
@pytest.mark.last
@pytest.mark.only_v1("Triton's interpreter cannot run V2's kernel for n-gram drafts")
class TestSpeculation:
    """Drafts repeat tokens that followed the same tokens earlier in the prompt or the answer."""

    @pytest.fixture(scope="class")
    def engine(self, start: Callable[..., Engine]) -> Engine:
        ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
        return start("llava", DIVPRUNE, speculative_config=ngram, max_num_batched_tokens=24)

    def test_answers_are_the_same(self, engine: Engine, reference: Any, drafted: list[list[int]]) -> None:
        checkpoint = engine.checkpoint
        cases = [
            (checkpoint.prompt(n), checkpoint.images(n), override) for n, override in ((1, {}), (2, {"keep": 0.5}))
        ]
        engine.check(reference, cases, 24)
        assert drafted

    def test_structured_answers(self, engine: Engine) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        checkpoint = engine.checkpoint
        choices = ["a red circle", "a blue square"]
        params = SamplingParams(
            temperature=0.0, max_tokens=24, structured_outputs=StructuredOutputsParams(choice=choices)
        )
        request = engine.request(checkpoint.prompt(1), checkpoint.images(1))
        (output,) = engine.llm.generate([request], params, use_tqdm=False)
        assert output.outputs[0].text in choices


@pytest.fixture(scope="module")
def eagle_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a random EAGLE-3 head: one layer, which reads the last token and hidden states of three layers."""
    folder = tmp_path_factory.mktemp("head")
    config = {key: value for key, value in text("llama", num_hidden_layers=1).items() if key != "model_type"}
    names = dict(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=VOCABULARY, tie_word_embeddings=False)
    LlamaConfig(**config | names).save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    inner = config["intermediate_size"]
    shapes = {
        "midlayer.self_attn.q_proj": (HIDDEN, 2 * HIDDEN), "midlayer.self_attn.k_proj": (HIDDEN // 2, 2 * HIDDEN),
        "midlayer.self_attn.v_proj": (HIDDEN // 2, 2 * HIDDEN), "midlayer.self_attn.o_proj": (HIDDEN, HIDDEN),
        "midlayer.mlp.gate_proj": (inner, HIDDEN), "midlayer.mlp.up_proj": (inner, HIDDEN),
        "midlayer.mlp.down_proj": (HIDDEN, inner), "fc": (HIDDEN, 3 * HIDDEN), "lm_head": (VOCABULARY, HIDDEN),
    }  # fmt: skip
    weights = {f"{name}.weight": torch.randn(shape, generator=generator) / 8 for name, shape in shapes.items()}
    norms = [f"midlayer.{name}" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")]
    weights |= {f"{name}.weight": torch.ones(HIDDEN) for name in (*norms, "norm")}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.only_v1("V2's kernels of drafts were not tried in Triton's interpreter")
class TestDraftsOfAModel:
    def test_answers_are_the_same(
        self, start: Callable[..., Engine], reference: Any, eagle_head: Path, drafted: list[list[int]]
    ) -> None:
        eagle = {"method": "eagle3", "model": str(eagle_head), "num_speculative_tokens": 2}
        engine = start("llava", DIVPRUNE, speculative_config=eagle, max_num_batched_tokens=24)
        checkpoint = engine.checkpoint
        cases = [
            (checkpoint.prompt(n), checkpoint.images(n), override) for n, override in ((1, {}), (2, {"keep": 0.5}))
        ]
        engine.check(reference, cases, 12)
        assert drafted


class TestLora:
    """Adapters of the language model."""

    @pytest.fixture(scope="class")
    def engine(self, start: Callable[..., Engine]) -> Engine:
        return start("llava", DIVPRUNE, enable_lora=True, max_lora_rank=8, max_loras=1)

    @pytest.fixture(scope="class")
    def adapter(self, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
        """Return the adapter's folder, and its update of each weight by name."""
        generator = torch.Generator().manual_seed(0)
        rank, weights, added = 4, {}, {}
        for layer in range(3):
            for name, width in (("q_proj", HIDDEN), ("v_proj", HIDDEN // 2)):
                prefix = f"model.language_model.layers.{layer}.self_attn.{name}"
                a, b = (torch.randn(shape, generator=generator) / 8 for shape in ((rank, HIDDEN), (width, rank)))
                weights |= {
                    f"base_model.model.{prefix}.lora_A.weight": a,
                    f"base_model.model.{prefix}.lora_B.weight": b,
                }
                added[f"{prefix}.weight"] = 2 * b @ a  # alpha / rank
        folder = tmp_path_factory.mktemp("adapter")
        config = dict(peft_type="LORA", r=rank, lora_alpha=2 * rank, target_modules=["q_proj", "v_proj"], bias="none")
        (folder / "adapter_config.json").write_text(json.dumps(config))
        save_file(weights, folder / "adapter_model.safetensors")
        return folder, added

    def test_an_adapter_of_the_language_model(self, engine: Engine, reference: Any, adapter: Any) -> None:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        folder, added = adapter
        prompt, images = engine.checkpoint.prompt(2), engine.checkpoint.images(2)
        request = engine.request(prompt, images)
        params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=5, ignore_eos=True)
        # One adapter per call: on a CPU, vLLM 0.32 applies it to all requests of a step, even without this plugin.
        (plain,), (adapted,) = (
            engine.llm.generate([request], params, use_tqdm=False, lora_request=adapter_request)
            for adapter_request in (None, LoRARequest("one", 1, str(folder)))
        )
        check_same(plain, *reference("llava").greedy(prompt, images, 6, DIVPRUNE))
        state = reference("llava").model.state_dict()
        before = {name: state[name].clone() for name in added}
        try:
            for name, value in added.items():
                state[name] += value
            check_same(adapted, *reference("llava").greedy(prompt, images, 6, DIVPRUNE))
        finally:
            for name, value in before.items():
                state[name].copy_(value)
        assert adapted.outputs[0].token_ids != plain.outputs[0].token_ids


class TestSharedCaches:
    """Separate servers encode, prefill and decode, and share their caches."""

    NAME = "qwen2_5_vl"

    @pytest.mark.only_v1("vLLM 0.32's V2 runner embeds text also on a server that only encodes, which has no decoder")
    def test_three_servers(
        self, start: Callable[..., Engine], reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def ec(role: str) -> dict[str, Any]:
            config = {"shared_storage_path": str(tmp_path / "encoded")}
            return dict(ec_connector="ECExampleConnector", ec_role=role, ec_connector_extra_config=config)

        def kv(role: str) -> dict[str, Any]:
            config = {"shared_storage_path": str(tmp_path / "read")}
            return dict(kv_connector="ExampleConnector", kv_role=role, kv_connector_extra_config=config)

        def check(engine: Engine, override: dict[str, Any], text: str) -> Any:
            (output,) = engine.check(reference, [(checkpoint.prompt(2, text), images, override)])
            return output

        override, text = {"keep": 0.8}, "what is it, and who is to be seen in there? "  # longer than a block
        encode = start(self.NAME, DIVPRUNE, ec_transfer_config=ec("ec_producer"))
        checkpoint = encode.checkpoint
        images = checkpoint.images(2)
        encode.generate([encode.request(checkpoint.prompt(2), images, override)], 1)

        calls = count_items(encode.model, monkeypatch)
        prefill = start(self.NAME, DIVPRUNE, ec_transfer_config=ec("ec_consumer"), kv_transfer_config=kv("kv_producer"))
        calls.clear()
        check(prefill, override, text)
        assert not calls
        check(prefill, {"keep": 0.5}, text)  # another setting is another cached item
        assert calls

        decode = start(self.NAME, DIVPRUNE, kv_transfer_config=kv("kv_consumer"))
        calls.clear()
        for setting in (override, {"keep": 0.5}):
            output = check(decode, setting, text)
            assert output.num_cached_tokens > len(output.prompt_token_ids) - len(text)
        assert not calls
        check(decode, {"keep": 0.3}, text)  # no server has read this setting
        assert calls


class TestNotOnACpu:
    """Features that vLLM lacks on a CPU, so their use with this plugin is untested."""

    def test_sleep_mode(self, folder: Callable[[str], Path]) -> None:
        from vllm.engine.arg_utils import EngineArgs

        with pytest.raises(ValueError, match="Sleep mode is not supported on current platform"):
            EngineArgs(str(folder("llava")), enable_sleep_mode=True, **OPTIONS).create_model_config()

    def test_kv_offload(self) -> None:
        from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

        spec = object.__new__(CPUOffloadingSpec)
        spec._worker = None
        with pytest.raises(Exception, match="only supported on CUDA-alike"):
            spec.get_worker(None)
