# SPDX-License-Identifier: Apache-2.0
"""`ask(attend=)`: answers that attend to a part of the memory.

The reference selects entries by loops over eager attention and generates one token at a time under a mask per layer
and head.
"""

from __future__ import annotations

import pytest
import torch

import tokenprune
from each import each
from hooks import removed_after
from processors import demo_model, llava, photo
from session_oracle import NAMES, Recorded, close, played, recorded
from tokenprune.errors import BudgetError, OptionError
from tokenprune.integrations.hf.sessions.memory import FRAME
from tokenprune.integrations.hf.sessions.positions import make_text_positions
from zoo import FAMILIES

QUESTION = [30, 31, 32]
SLIDING = "gemma3"


def play_stream(name: str, build, policy: str = "uniform", memory: int = 120) -> Recorded:
    return played(recorded(FAMILIES[name], build(FAMILIES[name]), memory=memory, policy=policy))


def forward(stream, memory, ids: list[int], start: int, **options):
    """Return the model's output for ids after `start` positions of question and answer."""
    row = torch.tensor([ids])
    positions = make_text_positions(stream.adapter, stream.progress.next + start, len(ids), row.device)
    with torch.no_grad():
        return stream.model(
            input_ids=row, position_ids=positions if len(positions) > 1 else positions[0],
            past_key_values=memory.cache, use_cache=True, **stream._token_types(row), **options,
        )  # fmt: skip


def naive_answer(recording: Recorded, count: int, attend: int) -> list[torch.Tensor]:
    """Return the logits of a greedy answer with masks instead of a packed cache."""
    stream = recording.session.fork()._stream
    memory, model = stream.memory, stream.model
    held = memory.held
    model.set_attn_implementation("eager")
    try:
        rows = forward(stream, memory.copy(), QUESTION, 0, output_attentions=True).attentions
    finally:
        model.set_attn_implementation("sdpa")
    heads, hidden = stream.adapter.text_config.num_attention_heads, {}
    for table_index, index in enumerate(memory.full_layers):
        table, row = memory.tables[table_index], rows[index][0, :, :, :held]  # `[Hq, question, held]`
        per_head = heads // table.shape[1]
        mask = torch.zeros(heads, held, dtype=torch.bool)
        for head in range(table.shape[1]):
            group = range(head * per_head, (head + 1) * per_head)
            visual = [entry for entry in range(held) if table[FRAME, head, entry] >= 0]
            score = {
                entry: sum(float(row[query_head, :, entry].mean()) for query_head in group) / per_head
                for entry in visual
            }
            hidden_entries = set(visual) - set(sorted(visual, key=lambda entry: (-score[entry], entry))[:attend])
            for query_head in group:
                mask[query_head, sorted(hidden_entries)] = True
        hidden[index] = mask

    def make_hook(index):
        def hook(module, args, kwargs):
            new = torch.zeros(1, heads, 1, kwargs_length[0])
            new[0, :, 0, :held].masked_fill_(hidden[index], torch.finfo(torch.float32).min)
            return args, kwargs | {"attention_mask": new}

        return hook

    output, logits, kwargs_length = forward(stream, memory, QUESTION, 0), [], [held + len(QUESTION)]
    handles = [
        stream.adapter.decoder.layers[index].register_forward_pre_hook(make_hook(index), with_kwargs=True)
        for index in memory.full_layers
    ]
    with removed_after(handles):
        for step in range(count):
            logits.append(output.logits[0, -1])
            kwargs_length[0] += 1
            output = forward(stream, memory, [int(logits[-1].argmax())], len(QUESTION) + step)
    return logits


def is_observed(model) -> bool:
    """Return whether the model's attention is observed."""
    return any("_tokenprune_taps" in vars(module) for module in model.modules())


@pytest.mark.parametrize("policy", ["uniform", "infinipot_v"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != SLIDING])
def test_an_answer_equals_one_under_masks(name: str, policy: str, build) -> None:
    recording = play_stream(name, build, policy)
    attend = recording.session.stats.visual // 4
    answer = recording.session.ask(QUESTION, max_new_tokens=5, attend=attend, return_dict=True)
    dense = recording.session.ask(QUESTION, max_new_tokens=5, return_dict=True)
    expected = naive_answer(recording, 5, attend)
    assert answer.ids.tolist() == [int(logits.argmax()) for logits in expected]
    assert all(close(actual, expected_logits) for actual, expected_logits in zip(answer.logits, expected, strict=True))
    assert torch.equal(answer.logits[0], dense.logits[0])  # the question attends to all entries
    assert (answer.logits[1] - dense.logits[1]).abs().max() > 1e-4


def test_windows_narrow_with_the_rest(build) -> None:
    recording = play_stream(SLIDING, build)
    window = recording.session._stream.memory.sliding[0].sliding_window
    attend = recording.session.stats.visual - 1
    answer = recording.session.ask(QUESTION, max_new_tokens=4, attend=attend, return_dict=True)
    expected = naive_answer(recording, 4, attend)
    assert all(close(actual, expected_logits) for actual, expected_logits in zip(answer.logits, expected, strict=True))
    with pytest.raises(BudgetError, match=f"at least {window}"):
        recording.session.ask(QUESTION, attend=window - 1, return_dict=True)


@pytest.mark.parametrize("policy", ["uniform", "infinipot_v"])
def test_attend_leaves_the_memory_unchanged(policy: str, build) -> None:
    asked, silent = play_stream("qwen2_5_vl", build, policy), play_stream("qwen2_5_vl", build, policy)
    first = asked.session.ask(QUESTION, attend=0.1, max_new_tokens=5, return_dict=True)
    other = asked.session.ask([40, 41], attend=0.1, max_new_tokens=5, return_dict=True)
    repeated = asked.session.ask(QUESTION, attend=0.1, max_new_tokens=5, return_dict=True)
    assert torch.equal(first.logits, repeated.logits) and not torch.equal(first.logits[1], other.logits[1])
    for layer, silent_layer in zip(
        asked.session._stream.memory.cache.layers, silent.session._stream.memory.cache.layers, strict=True
    ):
        assert torch.equal(layer.keys, silent_layer.keys) and torch.equal(layer.values, silent_layer.values)
    assert not is_observed(asked.model)


def test_a_failed_question_leaves_no_trace(build) -> None:
    recording = play_stream("llava", build)
    keys = [layer.keys for layer in recording.session._stream.memory.cache.layers]

    def fail(ids, scores):
        raise RuntimeError("mine")

    for processors in ([fail], [lambda ids, scores: scores, fail]):
        with pytest.raises(RuntimeError, match="mine") as raised:  # its traceback keeps frames alive
            recording.session.ask(QUESTION, attend=0.2, logits_processor=processors, return_dict=True)
        assert raised and not is_observed(recording.model)
    assert all(torch.equal(old, new.keys) for old, new in
               zip(keys, recording.session._stream.memory.cache.layers, strict=True))  # fmt: skip


def test_attend_to_all_entries_equals_the_plain_answer(build) -> None:
    session = play_stream("llava", build).session
    plain = session.ask(QUESTION, max_new_tokens=4, return_dict=True)
    for attend in (1.0, session.stats.visual, 10**9):
        assert torch.equal(
            session.ask(QUESTION, max_new_tokens=4, attend=attend, return_dict=True).logits, plain.logits
        )
    assert session.ask(QUESTION, max_new_tokens=4, attend=1, return_dict=True).ids.shape == (4,)


def test_sampling_and_logits_processors(build) -> None:
    recording = play_stream("llava", build)
    session, calls = recording.session, []

    def record(ids, scores):
        calls.append(is_observed(recording.model))
        return scores

    options = {"max_new_tokens": 4, "do_sample": True, "logits_processor": [record], "return_dict": True, "attend": 0.3}
    torch.manual_seed(0)
    first = session.ask(QUESTION, **options)
    torch.manual_seed(0)
    assert torch.equal(first.ids, session.ask(QUESTION, **options).ids)
    assert calls == [True, False, False, False] * 2  # only the question's forward is observed


def test_guidance_with_attend(build) -> None:
    """Its forwards use a separate cache and are not observed."""
    session = play_stream("llava", build).session
    options = {"max_new_tokens": 4, "return_dict": True}
    plain, guided, full_guided = (
        session.ask(QUESTION, **options, **more)
        for more in ({"attend": 0.1}, {"attend": 0.1, "guidance_scale": 1.5}, {"guidance_scale": 1.5})
    )
    assert torch.equal(guided.logits[0], full_guided.logits[0])
    same = [a == b for a, b in zip(plain.ids.tolist(), guided.ids.tolist(), strict=True)]
    until = same.index(False) + 1 if False in same else len(same)
    assert torch.equal(plain.logits[:until], guided.logits[:until])
    assert not torch.equal(guided.logits[1], full_guided.logits[1])


@each("attend", [0, 0.0, -1, 1.5, True, None, "half", float("nan")])
def test_invalid_shares_are_refused(attend, build) -> None:
    session = play_stream("llava", build).session
    with pytest.raises(BudgetError, match="attend="):
        session.ask(QUESTION, attend=attend, return_dict=True)
    assert session.ask(QUESTION, max_new_tokens=1, return_dict=True).ids.shape == (1,)


def test_a_question_in_chunks_is_refused(build) -> None:
    with pytest.raises(OptionError, match="prefill_chunk_size"):
        play_stream("llava", build).session.ask(QUESTION, attend=0.5, prefill_chunk_size=2, return_dict=True)


def test_a_session_without_images_answers(build) -> None:
    session = tokenprune.sessions.session(build(FAMILIES["llava"]), memory=200)
    session.say([1, 20])
    assert session.ask(QUESTION, attend=0.5, max_new_tokens=2, return_dict=True).ids.shape == (2,)


def test_words_and_a_patched_model() -> None:
    model = demo_model()
    with tokenprune.patched(model, "divprune", keep=0.5):
        session = tokenprune.sessions.session(model, llava(), memory=2000)
        session.say("look").see([photo(64, 64, seed) for seed in range(4)])
        keys_before = [layer.keys.clone() for layer in session._stream.memory.cache.layers]
        answer = session.ask("what color is it?", attend=0.5, max_new_tokens=4, remember=True)
        assert isinstance(answer, str) and session.stats.text > len(QUESTION)
        layers_after = session._stream.memory.cache.layers
        assert all(
            torch.equal(old, new.keys[:, :, : old.shape[2]]) for old, new in zip(keys_before, layers_after, strict=True)
        )
