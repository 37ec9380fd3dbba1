# SPDX-License-Identifier: Apache-2.0
"""`"positions": "original"` with one axis of positions: answers match the patched transformers model.

Tiles with separate budgets are in test_served_families.py, text within an image in test_caching.py, and other decoders
in test_more_families.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFeatureSpec, MultiModalFieldElem, PlaceholderRange

from conftest import DIVPRUNE, ORIGINAL, Engine, check_recomputed
from front_end import config
from tokenprune.errors import OptionError, UnsupportedSetupError
from tokenprune.integrations.vllm.settings.parse import parse_setting
from tokenprune.integrations.vllm.settings.plan import Plan, field_name, find_runs
from tokenprune.integrations.vllm.settings.position_checks import configure_positions, has_original_positions
from tokenprune.integrations.vllm.worker.positions import (
    DIGITS,
    ReadTokens,
    compute_line_positions,
    encode_columns,
    write_positions,
)
from tokenprune.models.families import SERVED

NAME, CHUNK, BLOCK = "llava_onevision", 24, 32
HALF = {"method": "divprune", "keep": 0.5}


@pytest.fixture(scope="module")
def engine(start: Callable[..., Engine]) -> Engine:
    """Chunks split every image, and the KV cache is too small for long answers to several prompts."""
    options = dict(max_num_batched_tokens=CHUNK, num_gpu_blocks_override=16, max_model_len=480)
    return start(NAME, HALF | ORIGINAL, **options)


def test_mixed_requests_and_the_prefix_cache(engine: Engine, reference: Any) -> None:
    engine.forget()
    checkpoint, images = engine.checkpoint, engine.checkpoint.images(2)
    two, side, first = checkpoint.prompt(2), "look: <image><image> what? ", "<image> or <image>, what? "
    cases: list[tuple] = [(prompt, images, {}) for prompt in (two, side, first)]
    cases += [(two, images, {"off": True}), (side, images, {"method": "vscan", "stage2": False, "keep": 0.25})]
    # The prompt ends with an image. This method keeps the last token; for other methods transformers keeps it.
    cases += [("what is it? <image>", images[:1], {"method": "uniform", "keep": 0.6})]
    cases += [("what? " * 8, [], {}), (two, images, {"keep": 1.0})]
    cases += map(checkpoint.video_case, (DIVPRUNE | {"per": "frame"}, {"method": "evs", "keep": 0.4}))
    outputs = engine.check(reference, cases, 12)
    # The answers differ from renumbered positions.
    logprobs = reference(NAME).greedy(two, images, 1, HALF)[1]
    likely = outputs[0].outputs[0].logprobs[0]
    assert max(abs(actual.logprob - float(logprobs[0, token])) for token, actual in likely.items()) > 0.01

    # Cache hits that end within an image, and the same images with another question.
    other = checkpoint.prompt(2, "something else altogether? ")
    engine.generate([engine.request(*cases[0])])
    for prompt in (two, other):
        (output,) = engine.check(reference, [(prompt, images)])
        assert output.num_cached_tokens >= BLOCK


def test_recomputed_requests(engine: Engine, reference: Any, preempted: list[str]) -> None:
    check_recomputed(engine, reference, preempted, {})


def test_prompts_longer_than_the_model_raise(engine: Engine, reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.forget()
    prompt, images = engine.checkpoint.prompt(2), engine.checkpoint.images(2)
    with monkeypatch.context() as patch:
        patch.setattr(engine.llm.model_config.hf_text_config, "max_position_embeddings", 121)
        with pytest.raises(OptionError, match=r"positions for fewer than 4: send fewer or smaller images"):
            engine.generate([engine.request(prompt, images)])
        engine.generate([engine.request(prompt, images, {"off": True})])
    engine.check(reference, [(prompt, images)])


def test_effect_of_the_setting(folder: Any) -> None:
    llava = config(folder("llava"), DIVPRUNE | ORIGINAL)
    assert llava.uses_mrope and llava.hf_text_config.rope_parameters["mrope_section"] == [16, 0, 0]
    for setting in (DIVPRUNE, DIVPRUNE | {"positions": "renumbered"}):
        plain = config(folder("llava"), setting)
        assert not plain.uses_mrope and not has_original_positions(plain)
    assert llava.compute_hash() != plain.compute_hash()  # key of compiled graphs
    only_positions = config(folder("llava"), ORIGINAL)
    assert only_positions.uses_mrope and only_positions.multimodal_config.tokenprune == {"off": True}
    qwen = config(folder("qwen2_5_vl"), DIVPRUNE | ORIGINAL)
    assert qwen.hf_text_config.rope_parameters["mrope_section"] == [4, 6, 6] and not has_original_positions(qwen)
    dart = {"method": "dart", "keep": 0.25, "pivot_text": 0, "experimental_in_llm": True}
    assert not config(folder("llava"), dart | ORIGINAL).uses_mrope
    for name, setting, says in (
        ("qwen2_5_vl", DIVPRUNE | {"positions": "renumbered"}, "Qwen2_5_VL.*M-RoPE. Leave positions out"),
        ("llava", dart | {"positions": "renumbered"}, "experimental_in_llm. Leave positions out"),
        ("llava", DIVPRUNE | {"positions": "orginal"}, "must be .original. .*not 'orginal'"),
        ("llava", DIVPRUNE | {"position": "original"}, "no key 'position': did you mean 'positions'"),
        ("llava", DIVPRUNE | {"profiles": {"a": ORIGINAL}}, "profile 'a': positions applies to the whole server"),
    ):
        with pytest.raises(ValueError, match=says):
            config(folder(name), setting)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"model_type": "internlm2"}, "'internlm2' is not known to"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope is scaled .'llama3'"),
        ({"rope_parameters": {"full_attention": {}, "sliding_attention": {}}}, "layers have different RoPE parameters"),
        ({"rope_parameters": {"rope_type": "default", "use_fope": True}}, "rope has use_fope"),
        ({"sliding_window": 1023}, "start with --max-model-len 1023 or less"),
        ({"layer_types": ["full_attention", "linear_attention"]}, r"other kinds \(linear_attention\)"),
        ({"llama_4_scaling": {"beta": 1.0}}, "in another way .llama_4_scaling"),
    ],
)
def test_unsupported_setups_raise(folder: Any, changed: dict[str, Any], says: str) -> None:
    model_config = config(folder("llava"), DIVPRUNE)
    for name, value in changed.items():
        setattr(model_config.hf_text_config, name, value)
    with pytest.raises(UnsupportedSetupError, match=f"(?s)LlavaForConditional.*here.*{says}.*leave positions out"):
        configure_positions("original", model_config, SERVED[model_config.architecture], False)
    assert not model_config.uses_mrope
    model_config.hf_text_config.sliding_window = model_config.max_model_len  # larger than any prompt
    if "sliding_window" in changed:
        configure_positions("original", model_config, SERVED[model_config.architecture], False)
        assert model_config.uses_mrope


@pytest.mark.parametrize("keep", [0.3, 1.0])
@pytest.mark.parametrize("per_run", [False, True])
def test_every_split(keep: float, per_run: bool) -> None:
    """Positions match a naive computation on the unpruned prompt, for all chunk sizes.

    Images are at both ends and adjacent. One image has text around it and within it.
    """
    generator = torch.Generator().manual_seed(0)
    tokens: list[int] = []
    # expected: index of each token in the unpruned prompt
    expected, features, rows = [], [], []
    full = 0
    for text, behind in (("#" * 8, 0), ("ab########c########d", 0), ("#" * 6, 3), ("#" * 12, 0)):
        placeholders = [letter == "#" for letter in text]
        plan = Plan.build(
            parse_setting({"method": "divprune", "keep": keep}),
            find_runs([9 if is_pad else 50 for is_pad in placeholders], placeholders),
            per_run,
        )
        is_kept = torch.tensor(placeholders)
        for segment, kept in zip(is_kept.nonzero().flatten().split(plan.counts), plan.keep, strict=True):
            is_kept[segment[torch.randperm(len(segment), generator=generator)[kept:]]] = False
        within = is_kept.clone()
        if plan.between:  # rows include text within the item
            first, end = plan.span
            within[first:end] |= ~torch.tensor(placeholders[first:end])
        prompt_tokens = plan.reduced() if plan.reduces else plan.tokens
        data = {field_name("image"): MultiModalFieldElem(data=plan.encode(), field=MultiModalBatchedField())}
        kept_indices = (is_kept | ~torch.tensor(placeholders)).nonzero().flatten()
        expected += [full + int(token_index) for token_index in kept_indices]
        assert len(kept_indices) == len(prompt_tokens)
        row_columns = within.nonzero().T if plan.between else is_kept.nonzero().T
        marked = [bool(within[token_index]) for token_index in kept_indices]
        rows.append(torch.cat([torch.zeros(row_columns.shape[1], 5), encode_columns(row_columns, torch.bfloat16)], 1))
        placeholder = PlaceholderRange(len(tokens), len(prompt_tokens), torch.tensor(marked))
        features.append(MultiModalFeatureSpec(data, "image", "", placeholder))
        tokens += [*prompt_tokens, *[50] * behind]
        expected += range(full + len(text), full + len(text) + behind)
        full += len(text) + behind
    provisional, delta, notes = compute_line_positions(tokens, features)
    assert delta == full - len(tokens)
    is_row, owner = torch.zeros(len(tokens), dtype=torch.bool), []
    for index, feature in enumerate(features):
        placeholder = feature.mm_position
        is_row[placeholder.offset : placeholder.offset + placeholder.length] = placeholder.is_embed
        owner += [index] * len(rows[index])
    all_rows, owner_of_row = torch.cat(rows), torch.tensor(owner)
    for size in range(1, len(tokens) + 1):
        for skipped in (0, len(tokens) // 2):  # a hit of the prefix cache
            positions = provisional.clone()[None]
            for computed in [*range(skipped, len(tokens), size), skipped]:  # and a recomputed request
                before, after = int(is_row[:computed].sum()), int(is_row[: computed + size].sum())
                chunk, owners = all_rows[before:after], owner_of_row[before:after]
                pieces = [chunk[owners == index] for index in owners.unique()]
                part = ReadTokens(0, features, notes, computed, min(size, len(tokens) - computed), 0)
                cut = write_positions(pieces, [part], positions, 1)
                assert [piece.shape for piece in cut] == [(len(piece), 5) for piece in pieces] and all_rows.shape[
                    1
                ] == 5 + DIGITS
            assert positions[0, 0, skipped:].tolist() == expected[skipped:]
            assert torch.equal(positions[0, 1:], provisional[1:])  # not read
