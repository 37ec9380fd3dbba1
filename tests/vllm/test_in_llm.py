# SPDX-License-Identifier: Apache-2.0
"""Cuts inside the decoder in the real engine: answers match the patched transformers model, generating with a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoints import DEEP, photo
from conftest import Engine, check_same
from runner import IN_LLM
from tokenprune import patched
from tokenprune.errors import OptionError
from tokenprune.methods import registry
from tokenprune.methods.in_llm.dart import Dart
from tokenprune.methods.in_llm.fastv import FastV
from tokenprune.selection.method import Method, Pruner, Site
from tokenprune.selection.tokens import VisualTokens

pytestmark = IN_LLM
NAME = "llava_deep"
BLOCK = 32
DART = Dart(pivot_text=0)
FREE = {"experimental_free_kv": True}
# A chunk holds an image (100 tokens) but not two, and three long answers do not fit into the cache at once.
TIGHT = dict(disable_chunked_mm_input=True, max_num_batched_tokens=160, max_model_len=512, num_gpu_blocks_override=26)
LONG = "Describe the image above in as many words as you can find, please, and "


def setting(method: Method, keep: float = 0.25) -> dict[str, Any]:
    return {"method": method.name, "keep": keep, "experimental_in_llm": True} | asdict(method)


def keep_complete_blocks(method: Method) -> Method:
    """The same method in transformers, where an item loses complete blocks and keeps at least one."""

    def resolve_count(self: Method, count: int, keep: int) -> int:
        while count - BLOCK >= max(keep, BLOCK):
            count -= BLOCK
        return count

    cls = type(method)
    return type(cls.__name__, (cls,), {"resolve_count": resolve_count})(**asdict(method))


def check(reference: Any, output: Any, prompt: str, images: list[Any], method: Method | None) -> None:
    answer = len(output.outputs[0].token_ids)
    patch = None if method is None else {"method": method, "keep": 0.25}
    check_same(output, *reference.generate(prompt, images, answer, patch))


def get_cache_manager(engine: Engine) -> Any:
    """Return vLLM's manager of the KV cache."""
    return engine.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager


def build_prompts(engine: Engine, images: Callable[[int], list[Any]]) -> list[tuple[str, list[Any]]]:
    """Return prompts with one, two, three and no images."""
    checkpoint = engine.checkpoint
    with_images = [
        (checkpoint.prompt(num_images, f"{LONG}case {num_images}? "), images(num_images)) for num_images in (1, 2, 3)
    ]
    return [*with_images, ("only text here, nothing else. ", [])]


class Loads:
    """With prefix caching and chunks that end before images, as on a busy server."""

    @pytest.fixture(autouse=True)
    def forget(self, engine: Engine) -> None:
        engine.forget()

    def test_single_and_concurrent_requests(self, engine: Engine, reference: Any, preempted: list[str]) -> None:
        photos = engine.checkpoint.images
        # The third short request stops before its image, which does not fit into the chunk.
        short = [(engine.checkpoint.prompt(1, f"{n}? "), photos(1, seed=n)) for n in range(3)]
        for prompts in (short, build_prompts(engine, photos)[:1], build_prompts(engine, lambda n: photos(n, seed=n))):
            outputs = engine.generate([engine.request(*case) for case in prompts], 60)
            for (prompt, images), output in zip(prompts, outputs, strict=True):
                check(reference(NAME), output, prompt, images, keep_complete_blocks(DART))
        assert preempted

    def test_prefix_shared_by_three_requests(self, engine: Engine, reference: Any) -> None:
        checkpoint = engine.checkpoint
        images = checkpoint.images(1)
        prompts = [
            checkpoint.prompt(1, LONG + question) for question in ("what is it? ", "where? ", "who painted it, why? ")
        ]
        hits = []
        for _ in range(2):
            outputs = engine.generate([engine.request(prompt, images) for prompt in prompts], 40)
            for prompt, output in zip(prompts, outputs, strict=True):
                check(reference(NAME), output, prompt, images, keep_complete_blocks(DART))
            hits.append([output.num_cached_tokens for output in outputs])
        assert hits[0][0] == 0 and min(hits[0][1:] + hits[1]) >= 160, hits
        # The same image with a new question.
        other = checkpoint.prompt(1, LONG + "then tell me a story about it. ")
        (output,) = engine.generate([engine.request(other, images)], 12)
        check(reference(NAME), output, other, images, keep_complete_blocks(DART))
        print(f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} tokens from the prefix cache")
        assert output.num_cached_tokens == 160

    def test_cache_hits_that_end_inside_an_image(self, engine: Engine, reference: Any, monkeypatch: Any) -> None:
        lookups: list[int] = []
        coordinator = get_cache_manager(engine).coordinator
        find = coordinator.find_longest_cache_hit

        def spy(*args: Any) -> Any:
            hit = find(*args)
            lookups.append(hit[1])
            return hit

        monkeypatch.setattr(coordinator, "find_longest_cache_hit", spy)
        first, *others = engine.checkpoint.images(3)
        hits = []
        for images, text in (
            ([first], "what? "),
            ([first], "no? "),
            ([first, others[0]], LONG),
            ([first, others[1]], LONG),
        ):
            placeholders = f"and {LONG}".join(["<image>"] * len(images))
            (output,) = engine.generate([engine.request(f"look: {placeholders} {text}", images)], 8)
            check(reference(NAME), output, f"look: {placeholders} {text}", images, keep_complete_blocks(DART))
            hits.append(output.num_cached_tokens)
        # A block with the end of an image also contains the tokens after it.
        assert lookups == [0, 96, 96, 160], lookups
        assert hits == [0, 0, 0, 160], hits


class TestDart(Loads):
    """All layers hold the same blocks."""

    @pytest.fixture(scope="class")
    def engine(self, start: Callable[..., Engine]) -> Engine:
        return start(NAME, setting(DART), **TIGHT)

    def test_selection_changes_answers(self, reference: Any) -> None:
        """The comparison is meaningful: another selection, or none, gives other answers."""
        prompt, images = DEEP[NAME].prompt(1, LONG), DEEP[NAME].images(1)
        patches = [
            None,
            *(
                {"method": method, "keep": 0.25}
                for method in (keep_complete_blocks(DART), DART, keep_complete_blocks(Dart()), FastV())
            ),
        ]
        logprobs = [reference(NAME).generate(prompt, images, 1, patch)[1] for patch in patches]
        assert min((first - other).abs().max() for first in logprobs for other in logprobs if first is not other) > 1e-2

    def test_request_can_switch_it_off(self, engine: Engine, reference: Any) -> None:
        checkpoint = engine.checkpoint
        prompt, images = checkpoint.prompt(1, LONG), checkpoint.images(1)
        for override, method in (({"off": True}, None), (None, keep_complete_blocks(DART)), ({"off": True}, None)):
            outputs = engine.generate([engine.request(prompt, images, override), engine.request(prompt, images)], 8)
            check(reference(NAME), outputs[0], prompt, images, method)
            check(reference(NAME), outputs[1], prompt, images, keep_complete_blocks(DART))
        engine.generate([engine.request(prompt, images, {"keep": 0.25})], 1)
        for override in ({"keep": 0.5}, {"method": "divprune"}, {"layer": 1}):
            with pytest.raises(OptionError, match="set for the whole server"):
                engine.generate([engine.request(prompt, images, override)])

    def test_prompt_that_ends_with_an_image(self, engine: Engine, reference: Any) -> None:
        """The answer starts from the last token of the image, which every method keeps."""
        for seed in range(4):
            images = engine.checkpoint.images(1, seed=seed)
            (output,) = engine.generate([engine.request("look: <image>", images)], 1)
            reference_model = reference(NAME)
            with torch.no_grad(), patched(reference_model.model, method=keep_complete_blocks(DART), keep=0.25):
                logits = reference_model.model(**reference_model.inputs("look: <image>", images)).logits[0]
            last = int((logits != 0).any(1).nonzero().max())  # zeros at dropped tokens
            logprobs = logits[last].float().log_softmax(-1)
            check_same(output, [int(logprobs.argmax())], logprobs[None])

    def test_prompt_logprobs_raise(self, engine: Engine) -> None:
        from vllm import SamplingParams
        from vllm.exceptions import VLLMValidationError

        refused, next_one = (
            engine.request(engine.checkpoint.prompt(1), engine.checkpoint.images(1, seed=seed)) for seed in (7, 8)
        )
        with pytest.raises(OptionError, match="log-probabilities are not available") as caught:
            engine.llm.generate([refused], SamplingParams(max_tokens=1, prompt_logprobs=1), use_tqdm=False)
        assert isinstance(caught.value, VLLMValidationError)  # the server returns HTTP 400
        assert caught.value.parameter == "prompt_logprobs"
        assert engine.generate([next_one], 1)


class TestFreed(Loads):
    """Layers after the cut hold no blocks for dropped tokens. The memory has blocks for two layers instead of four."""

    @pytest.fixture(scope="class")
    def engine(self, start: Callable[..., Engine]) -> Engine:
        return start(NAME, setting(DART) | FREE, **TIGHT | {"num_gpu_blocks_override": 2 * 20})

    @pytest.fixture(autouse=True)
    def everything_comes_back(self, engine: Engine) -> Iterator[None]:
        yield
        manager = get_cache_manager(engine)
        # vLLM keeps one block, the null block.
        assert manager.block_pool.get_num_free_blocks() == manager.block_pool.num_gpu_blocks - 1
        assert not any(group_manager.held for group_manager in manager.coordinator.single_type_managers)

    def test_aborted_requests_free_their_blocks(self, engine: Engine) -> None:
        from vllm import SamplingParams

        core, pool = engine.llm.llm_engine, get_cache_manager(engine).block_pool
        request = engine.request(engine.checkpoint.prompt(1, LONG), engine.checkpoint.images(1))
        for name in ("read", "not read"):
            core.add_request(name, request, SamplingParams(max_tokens=30, ignore_eos=True))
            if name == "read":
                for _ in range(4):
                    core.step()
        assert pool.get_num_free_blocks() < pool.num_gpu_blocks - 8
        core.abort_request(["read", "not read"])
        assert not core.has_unfinished_requests()

    def test_number_of_held_blocks(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        manager, num_held = get_cache_manager(engine), []
        allocate = manager.allocate_slots

        def spy(request: Any, *args: Any, **kwargs: Any) -> Any:
            new_blocks = allocate(request, *args, **kwargs)
            blocks = manager.coordinator.get_blocks(request.request_id)
            num_held.append(
                (request.num_prompt_tokens, *(sum(not block.is_null for block in group) for group in blocks))
            )
            return new_blocks

        monkeypatch.setattr(manager, "allocate_slots", spy)
        for override in (None, {"off": True}):
            for images in range(4):
                prompt = engine.checkpoint.prompt(images, LONG) if images else LONG
                engine.generate([engine.request(prompt, engine.checkpoint.images(images), override)], 1)
                tokens, front, behind = num_held[-1]  # an image of 100 tokens keeps 36
                assert (front, front - behind) == (-(-tokens // BLOCK), 0 if override else 2 * images)


class TestFastV:
    """Whole prompts, no prefix cache, and an exact number of tokens."""

    @pytest.mark.parametrize(
        ("method", "free", "blocks"),
        # With freed blocks each group has one layer: one before the cut, three after it.
        [(FastV(), {}, 19), (Dart(layer=1), FREE, 4 * 21)],
        ids=["fastv", "dart with text, freed"],
    )
    def test_concurrent_requests(
        self, start: Any, reference: Any, preempted: list[str], method: Method, free: dict[str, Any], blocks: int
    ) -> None:
        options = dict(enable_prefix_caching=False, enable_chunked_prefill=False, max_num_batched_tokens=512)
        engine = start(NAME, setting(method) | free, max_model_len=512, num_gpu_blocks_override=blocks, **options)
        prompts = build_prompts(engine, engine.checkpoint.images)
        outputs = engine.generate([engine.request(*case) for case in prompts], 60)
        for (prompt, images), output in zip(prompts, outputs, strict=True):
            check(reference(NAME), output, prompt, images, method)
        assert preempted  # recomputed with a part of the answer, which must not affect the selection


@dataclass(frozen=True)
class Loud(Pruner):
    """Keep the tokens of the largest norm."""

    layer: int = 2

    def score(self, tokens: VisualTokens) -> Tensor:
        return tokens.hidden.float().norm(dim=-1) + tokens.keys.float().norm(dim=-1)


@dataclass(frozen=True)
class Curious(Pruner):
    """Keep tokens by the attention of the text, by large values, and by the change in the layer before."""

    layer: int = 2

    @property
    def query_aware(self) -> bool:
        return True

    def score(self, tokens: VisualTokens) -> Tensor:
        text = tokens.text.mask.float()
        received = tokens.attention_from(text / text.sum(1, keepdim=True)).mean(1)
        about = torch.einsum("shm,shmn->sn", tokens.text.attention.sum(2), tokens.text_attention)
        moved = (tokens.hidden - tokens.previous_hidden).float().norm(dim=-1)
        first = tokens.first_row_attention.mean(1)
        return (received + first) * 100 + about + tokens.values.float().norm(dim=-1) + moved


class TestOthers:
    def test_text_attention_matches_transformers(self, start: Any, reference: Any) -> None:
        needs = ("text_attention", "first_row_attention", "values", "previous_hidden")
        register = registry.register("curious", site=Site.IN_LLM, needs=needs)
        try:
            method = register(Curious)()
            options = dict(enable_prefix_caching=False, enable_chunked_prefill=False, max_num_batched_tokens=512)
            engine = start(NAME, setting(method), max_model_len=512, **options)
            prompts = build_prompts(engine, engine.checkpoint.images)
            outputs = engine.generate([engine.request(*case) for case in prompts], 12)
            for (prompt, images), output in zip(prompts, outputs, strict=True):
                check(reference(NAME), output, prompt, images, method)
        finally:
            registry._METHODS.pop("curious")

    @pytest.fixture
    def loud(self) -> Iterator[Method]:
        registry.register("loud", site=Site.IN_LLM, needs=("keys",))(Loud)
        yield Loud()
        registry._METHODS.pop("loud")

    def test_third_party_method_with_mrope(self, start: Any, reference: Any, loud: Method) -> None:
        engine = start("qwen2_5_vl", setting(loud), disable_chunked_mm_input=True, max_num_batched_tokens=1200)
        sizes = [(280, 224), (224, 420), (112, 112)]
        prompts = build_prompts(engine, lambda n: [photo(*sizes[index], seed=index) for index in range(n)])
        for hit in (0, 160):
            outputs = engine.generate([engine.request(*case) for case in prompts], 12)
            for (prompt, images), output in zip(prompts, outputs, strict=True):
                check(reference("qwen2_5_vl"), output, prompt, images, keep_complete_blocks(loud))
            assert outputs[0].num_cached_tokens == hit
