# SPDX-License-Identifier: Apache-2.0
"""Sessions with a processor: chat templates taken apart, frames in blocks, answers in words."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from jinja2 import Template as Jinja

from processors import demo_model, llava, photo
from tokenprune.errors import SessionError
from tokenprune.integrations.hf import sessions
from tokenprune.integrations.hf.sessions.prompts import Template

CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ m.role }}\n{% for p in m.content %}{% if p.type == 'image' %}<|image|>"
    "{% elif p.type == 'video' %}<|video|>{% else %}{{ p.text }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAVA = (  # images first, then texts
    "{% for m in messages %}{{ m.role.upper() + ': ' }}"
    "{% for p in m.content if p.type == 'image' %}<image>\n{% endfor %}"
    "{% for p in m.content if p.type == 'text' %}{{ p.text + ' ' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
LINES = (  # each image ends a line, like the first line of a turn
    "{% for m in messages %}<s>{{ m.role }}\n{% for p in m.content %}{% if p.type == 'image' %}<img>\n"
    "{% elif p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def make_processor(template: str) -> SimpleNamespace:
    def write(chat: list[dict], tokenize: bool = False, add_generation_prompt: bool = False) -> str:
        return Jinja(template, keep_trailing_newline=True).render(
            messages=chat, add_generation_prompt=add_generation_prompt
        )

    return SimpleNamespace(apply_chat_template=write)


@pytest.mark.parametrize(
    "template, opening, image, video",
    [
        (CHATML, "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n", "<|image|>", "<|video|>"),
        (LLAVA, "USER: ", "<image>\n", ""),
        (LINES, "<s>user\n", "<img>\n", ""),
    ],
)  # fmt: skip
def test_a_chat_is_the_sum_of_its_pieces(template: str, opening: str, image: str, video: str) -> None:
    processor = make_processor(template)
    parsed = Template.from_processor(processor)
    assert (parsed.opening, parsed.image, parsed.video) == (opening, image, video)
    before, after = parsed.text
    images, text = [{"type": "image"}] * 3, {"type": "text", "text": "why is it blue?"}
    chat = [{"role": "user", "content": [*images, text]}]
    pieces = parsed.opening + parsed.image * 3 + before + "why is it blue?" + after + parsed.closing
    assert pieces == processor.apply_chat_template(chat, add_generation_prompt=True)
    answer = {"role": "assistant", "content": [{"type": "text", "text": "so"}]}
    longer_chat = [*chat, answer, {"role": "user", "content": [text]}]
    expected = processor.apply_chat_template(longer_chat, add_generation_prompt=True)
    rest = expected.partition("so")[2]
    assert parsed.reopening + before + text["text"] + after + parsed.closing == rest


@pytest.mark.parametrize("template", ["{{ messages | length }}", "{{ nothing.at.all }}", "{{ messages[0].content }}"])
def test_a_template_that_cannot_be_taken_apart_is_refused(template: str) -> None:
    with pytest.raises(SessionError, match="Pass token ids"):
        Template.from_processor(make_processor(template))


def test_questions_about_one_image_are_answered_as_by_generate() -> None:
    model, processor = demo_model(), llava()
    image, question = photo(96, 96), "what color is it?"
    session = sessions.session(model, processor, memory=2000).see(image)
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
    prompt = processor.apply_chat_template(chat, add_generation_prompt=True)
    inputs = processor(text=[prompt], images=[image], return_tensors="pt")
    answer = session.ask(question, max_new_tokens=4, return_dict=True)
    memory = session._stream.memory
    assert inputs["input_ids"][0, : memory.held].tolist() == memory.tables[0][3, 0].tolist()
    with torch.no_grad():
        expected = model(**inputs).logits[0, -1]
    assert (answer.logits[0] - expected).abs().max() < 1e-4
    written = model.generate(**inputs, max_new_tokens=4, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert answer.ids.tolist() == written.tolist()
    assert answer.text == processor.decode(written, skip_special_tokens=True).strip()


@pytest.mark.parametrize("block", [1, 3, None])
def test_blocks_change_nothing_where_there_is_room_for_all(block: int | None) -> None:
    session = sessions.session(demo_model(), llava(), memory=4000, block=block)
    session.say("look").see([photo(64, 64, seed) for seed in range(4)])
    one_block = sessions.session(demo_model(), llava(), memory=4000, block=4)
    one_block.say("look").see([photo(64, 64, seed) for seed in range(4)])
    in_blocks, at_once = (s.ask("what?", max_new_tokens=2, return_dict=True).logits[0] for s in (session, one_block))
    assert (in_blocks - at_once).abs().max() < 1e-4
    assert session.stats.frames_seen == 4 and session.stats.tokens_seen == one_block.stats.tokens_seen


def test_a_remembered_turn_reads_as_a_chat() -> None:
    model, processor = demo_model(), llava()
    session = sessions.session(model, processor, memory=2000).see(photo(64, 64))
    answer = session.ask("what color is the circle", max_new_tokens=8, remember=True)
    second_answer = session.ask("how many circles", max_new_tokens=8, remember=True)
    chat = processor.decode(session._stream.memory.tables[0][3, 0]).replace("<image> ", "")
    turns = f"what color is the circle assistant : {answer} user : how many circles assistant : {second_answer} user :"
    assert chat == f"{processor.decode(session._prompt_writer.encode_opening()[0])} {turns}"


def test_arrays_are_frames_and_long_lists_are_cut_into_blocks() -> None:
    frames = np.stack([np.asarray(photo(64, 64, seed)) for seed in range(7)])
    session = sessions.session(demo_model(), llava(), memory=500, policy=sessions.policy("window", sink=0))
    session.see(frames)
    stats = session.stats
    assert stats.frames_seen == 7 and stats.visual <= 500 and stats.compressions > 0
    assert stats.oldest_frame > 0 and "7 frames" in repr(session)
    listed = sessions.session(demo_model(), llava(), memory=500, policy=sessions.policy("window", sink=0))
    listed.see([photo(64, 64, seed) for seed in range(7)])
    assert listed.stats == stats


@pytest.mark.parametrize("text", ["", "  \n"])
def test_empty_words_are_refused(text: str) -> None:
    session = sessions.session(demo_model(), llava(), memory=500)
    for call in (session.say, session.ask):
        with pytest.raises(SessionError, match="the text is empty"):
            call(text)
    assert session.stats.tokens_seen == 0
