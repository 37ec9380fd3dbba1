# SPDX-License-Identifier: Apache-2.0
"""What a server may do besides: speculation, structured answers, LoRA on the language model, caches that are shared by
servers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from checkpoints import HIDDEN
from conftest import DIVPRUNE, Engine, same

BLOCK = 32


# It imports numba; then vLLM 0.32 stumbles over one of its objects whenever another engine starts in this process.
@pytest.mark.last
class TestSpeculation:
    """Drafts are what followed the same tokens earlier in the prompt or in the answer."""

    @pytest.fixture(scope="class")
    def engine(self, start: Callable[..., Engine]) -> Engine:
        ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
        return start("llava", DIVPRUNE, speculative_config=ngram, max_num_batched_tokens=24)

    def test_answers_are_the_same(self, engine: Engine, reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.v1.core.sched.scheduler import Scheduler

        drafts: list[list[int]] = []
        schedule = Scheduler.schedule

        def spy(self: Any, *args: Any, **kwargs: Any) -> Any:
            made = schedule(self, *args, **kwargs)
            drafts.extend(made.scheduled_spec_decode_tokens.values())
            return made

        monkeypatch.setattr(Scheduler, "schedule", spy)
        checkpoint = engine.checkpoint
        asked = [(checkpoint.prompt(n), checkpoint.images(n), o) for n, o in ((1, {}), (2, {"keep": 0.5}))]
        outputs = engine.generate([engine.request(*one) for one in asked], 24)
        assert drafts
        for (prompt, images, override), output in zip(asked, outputs, strict=True):
            same(output, *reference("llava").greedy(prompt, images, 24, DIVPRUNE | override))

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


class TestLora:
    """Adapters of the language model; on the vision tower they are refused."""

    @pytest.fixture(scope="class")
    def engine(self, start: Callable[..., Engine]) -> Engine:
        return start("llava", DIVPRUNE, enable_lora=True, max_lora_rank=8, max_loras=1)

    @pytest.fixture(scope="class")
    def adapter(self, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
        """A folder, and what the adapter adds to each weight, by the weight's name."""
        generator = torch.Generator().manual_seed(0)
        rank, weights, added = 4, {}, {}
        for layer in range(3):
            for name, width in (("q_proj", HIDDEN), ("v_proj", HIDDEN // 2)):
                where = f"model.language_model.layers.{layer}.self_attn.{name}"
                a, b = (torch.randn(shape, generator=generator) / 8 for shape in ((rank, HIDDEN), (width, rank)))
                weights |= {f"base_model.model.{where}.lora_A.weight": a, f"base_model.model.{where}.lora_B.weight": b}
                added[f"{where}.weight"] = 2 * b @ a  # alpha / rank
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
        # One after the other: on CPU vLLM 0.32 gives the adapter to all requests of a step, also without this plugin.
        (plain,), (adapted,) = (
            engine.llm.generate([request], params, use_tqdm=False, lora_request=one)
            for one in (None, LoRARequest("one", 1, str(folder)))
        )
        same(plain, *reference("llava").greedy(prompt, images, 6, DIVPRUNE))
        state = reference("llava").model.state_dict()
        before = {name: state[name].clone() for name in added}
        try:
            for name, value in added.items():
                state[name] += value
            same(adapted, *reference("llava").greedy(prompt, images, 6, DIVPRUNE))
        finally:
            for name, value in before.items():
                state[name].copy_(value)
        assert adapted.outputs[0].token_ids != plain.outputs[0].token_ids


class TestSharedCaches:
    """What one server encoded and read is what another goes on from (encode, prefill and decode apart)."""

    NAME = "qwen2_5_vl"

    def test_a_second_server(
        self, start: Callable[..., Engine], reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def ec(role: str) -> dict[str, Any]:
            where = {"shared_storage_path": str(tmp_path / "encoded")}
            return dict(ec_connector="ECExampleConnector", ec_role=role, ec_connector_extra_config=where)

        first = start(self.NAME, DIVPRUNE, ec_transfer_config=ec("ec_producer"))
        checkpoint = first.checkpoint
        prompt, images, override = checkpoint.prompt(2), checkpoint.images(2), {"keep": 0.8}
        first.generate([first.request(prompt, images, override)], 1)

        where = {"shared_storage_path": str(tmp_path / "read")}
        kv = dict(kv_connector="ExampleConnector", kv_role="kv_both", kv_connector_extra_config=where)
        second = start(self.NAME, DIVPRUNE, ec_transfer_config=ec("ec_consumer"), kv_transfer_config=kv)
        calls: list[int] = []
        embed = type(second.model).embed_multimodal
        monkeypatch.setattr(
            type(second.model), "embed_multimodal", lambda self, **kw: calls.append(1) or embed(self, **kw)
        )
        for cached in (0, BLOCK):  # the second time from what the first one wrote of its KV cache
            second.forget()
            (output,) = second.generate([second.request(prompt, images, override)])
            same(output, *reference(self.NAME).greedy(prompt, images, 6, DIVPRUNE | override))
            assert output.num_cached_tokens >= cached
        assert not calls
        # Another setting is another item.
        (output,) = second.generate([second.request(prompt, images, {"keep": 0.5})])
        same(output, *reference(self.NAME).greedy(prompt, images, 6, DIVPRUNE | {"keep": 0.5}))
        assert calls
