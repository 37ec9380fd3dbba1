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
LINES = (  # each image ends a line, as the turn's first one does
    "{% for m in messages %}<s>{{ m.role }}\n{% for p in m.content %}{% if p.type == 'image' %}<img>\n"
    "{% elif p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def writer(template: str) -> SimpleNamespace:
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
    processor = writer(template)
    made = Template.from_processor(processor)
    assert (made.opening, made.image, made.video) == (opening, image, video)
    before, after = made.text
    images, text = [{"type": "image"}] * 3, {"type": "text", "text": "why is it blue?"}
    chat = [{"role": "user", "content": [*images, text]}]
    pieces = made.opening + made.image * 3 + before + "why is it blue?" + after + made.closing
    assert pieces == processor.apply_chat_template(chat, add_generation_prompt=True)
    answer = {"role": "assistant", "content": [{"type": "text", "text": "so"}]}
    again = [*chat, answer, {"role": "user", "content": [text]}]
    wanted = processor.apply_chat_template(again, add_generation_prompt=True)
    rest = wanted.partition("so")[2]
    assert made.reopening + before + text["text"] + after + made.closing == rest


@pytest.mark.parametrize("template", ["{{ messages | length }}", "{{ nothing.at.all }}", "{{ messages[0].content }}"])
def test_a_template_that_cannot_be_taken_apart_is_refused(template: str) -> None:
    with pytest.raises(SessionError, match="Pass token ids"):
        Template.from_processor(writer(template))


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
        wanted = model(**inputs).logits[0, -1]
    assert (answer.logits[0] - wanted).abs().max() < 1e-4
    written = model.generate(**inputs, max_new_tokens=4, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert answer.ids.tolist() == written.tolist()
    assert answer.text == processor.decode(written, skip_special_tokens=True).strip()


@pytest.mark.parametrize("block", [1, 3, None])
def test_blocks_change_nothing_where_there_is_room_for_all(block: int | None) -> None:
    session = sessions.session(demo_model(), llava(), memory=4000, block=block)
    session.say("look").see([photo(64, 64, seed) for seed in range(4)])
    whole = sessions.session(demo_model(), llava(), memory=4000, block=4)
    whole.say("look").see([photo(64, 64, seed) for seed in range(4)])
    one, other = (s.ask("what?", max_new_tokens=2, return_dict=True).logits[0] for s in (session, whole))
    assert (one - other).abs().max() < 1e-4
    assert session.stats.frames_seen == 4 and session.stats.tokens_seen == whole.stats.tokens_seen


def test_a_remembered_turn_reads_as_a_chat() -> None:
    model, processor = demo_model(), llava()
    session = sessions.session(model, processor, memory=2000).see(photo(64, 64))
    answer = session.ask("what color is the circle", max_new_tokens=8, remember=True)
    again = session.ask("how many circles", max_new_tokens=8, remember=True)
    chat = processor.decode(session._stream.memory.tables[0][3, 0]).replace("<image> ", "")
    asked = f"what color is the circle assistant : {answer} user : how many circles assistant : {again} user :"
    assert chat == f"{processor.decode(session._prompt_writer.encode_opening()[0])} {asked}"


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
