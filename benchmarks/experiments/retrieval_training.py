# SPDX-License-Identifier: Apache-2.0
"""Train a small ColQwen2 to retrieve drawn documents, in half an hour on one CPU core.

    python benchmarks/experiments/retrieval_training.py --out FOLDER --minutes 35

The model has transformers' ColQwen2 class, demo_qwen's vision tower (frozen), the first four layers of its decoder, and
a new projection to 64 numbers. A question names three of the four things that a document of 256 x 256 pixels (256
visual tokens) shows. The loss is the cross-entropy of MaxSim scores within a batch. The weights go to --out.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoProcessor, ColQwen2Config, ColQwen2ForRetrieval, Qwen2_5_VLForConditionalGeneration

from tokenprune_demo.drawn_documents import LAYOUTS, draw_document
from tokenprune_demo.smol import HERE

DEMO = HERE.parent / "demo_qwen"
SIZE, TOKENS, LAYERS, WIDTH = 256, 256, 4, 64
PROMPT = "describe the image."
TRAIN_SEED, TEST_SEED = 20270101, 20270202


@dataclass
class Page:
    """A drawn document, and a phrase for each thing that it shows."""

    image: Image.Image
    facts: list[str]


def draw(seed: int, index: int) -> Page:
    document = draw_document(np.random.default_rng((seed, index)), LAYOUTS[index % len(LAYOUTS)], (SIZE, SIZE))
    phrases = {"word": "sign {}", "digits": "digit {}"}
    facts = []
    for drawn_question in document.questions:
        thing = drawn_question.text.removeprefix("what color is the ").rstrip("?")  # "circle", "tiny heart"
        facts.append(
            phrases[drawn_question.kind].format(drawn_question.answer)
            if drawn_question.kind in phrases
            else f"{drawn_question.answer} {thing}"
        )
    return Page(document.image, facts)


def question(page: Page, left_out: int) -> str:
    """Name all but one of the things on a page."""
    return " ".join(fact for index, fact in enumerate(page.facts) if index != left_out)


def assemble() -> ColQwen2ForRetrieval:
    source = Qwen2_5_VLForConditionalGeneration.from_pretrained(DEMO).model
    inner = source.config.to_dict()
    inner["text_config"] |= {"num_hidden_layers": LAYERS, "layer_types": ["full_attention"] * LAYERS}
    torch.manual_seed(0)
    model = ColQwen2ForRetrieval(ColQwen2Config(vlm_config=inner, embedding_dim=WIDTH))
    missing, _ = model.vlm.load_state_dict(source.state_dict(), strict=False)
    assert not missing
    return model.eval()


class Prompts:
    """Build the model's inputs for pages and questions."""

    def __init__(self, model: ColQwen2ForRetrieval) -> None:
        self.processor = AutoProcessor.from_pretrained(DEMO)
        config = model.config.vlm_config
        words = self.ids(PROMPT)
        opening, closing = config.vision_start_token_id, config.vision_end_token_id
        self.page = torch.tensor([words[0], opening, *[config.image_token_id] * TOKENS, closing, *words[1:]])

    def ids(self, text: str) -> list[int]:
        return self.processor.tokenizer(text).input_ids

    def pages(self, pages: list[Page]) -> dict[str, Tensor]:
        processed = self.processor.image_processor(images=[page.image for page in pages], return_tensors="pt")
        ids = self.page.expand(len(pages), -1)
        pixels = processed["pixel_values"].view(len(pages), -1, processed["pixel_values"].shape[-1])
        return {
            "input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels,
            "image_grid_thw": processed["image_grid_thw"],
        }  # fmt: skip

    def questions(self, texts: list[str]) -> dict[str, Tensor]:
        rows = [torch.tensor(self.ids(text)) for text in texts]
        mask = pad_sequence([torch.ones_like(row) for row in rows], True, 0)
        return {"input_ids": pad_sequence(rows, True, 0), "attention_mask": mask}


@torch.no_grad()
def features(model: ColQwen2ForRetrieval, prompts: Prompts, pages: list[Page]) -> Tensor:
    """Return the vision tower's output for pages: float16, shape (pages, TOKENS, hidden)."""
    outputs = []
    for start in range(0, len(pages), 8):
        inputs = prompts.pages(pages[start : start + 8])
        output = model.vlm.visual(inputs["pixel_values"].flatten(0, 1), grid_thw=inputs["image_grid_thw"])
        outputs.append(output.pooler_output.view(-1, TOKENS, output.pooler_output.shape[-1]).half())
    return torch.cat(outputs)


def embed(model: ColQwen2ForRetrieval, prompts: Prompts, encoded: Tensor) -> Tensor:
    """Embed pages from their tower output, shape (pages, length, WIDTH)."""
    ids = prompts.page.expand(len(encoded), -1)
    is_image = (ids == model.config.vlm_config.image_token_id).unsqueeze(-1)
    embeds = model.vlm.get_input_embeddings()(ids).masked_scatter(is_image, encoded.float())
    return model(inputs_embeds=embeds, attention_mask=torch.ones_like(ids)).embeddings


def score(queries: Tensor, mask: Tensor, pages: Tensor) -> Tensor:
    """Return mean similarities of a question's tokens to the closest page vectors, shape (questions, pages)."""
    closest = torch.einsum("qtd,pvd->qptv", queries, pages).amax(-1) * mask[:, None]
    return closest.sum(-1) / mask.sum(-1)[:, None]


def train(model: ColQwen2ForRetrieval, prompts: Prompts, pages: list[Page], minutes: float, batch: int) -> None:
    encoded, start, rng, step = features(model, prompts, pages), time.perf_counter(), np.random.default_rng(0), 0
    print(f"encoded {len(pages)} pages in {time.perf_counter() - start:.0f} s", flush=True)
    model.vlm.visual.requires_grad_(False)
    learned: list[Any] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    scale = torch.nn.Parameter(torch.tensor(2.7))
    optimizer = torch.optim.AdamW([*learned, scale], lr=1e-3, weight_decay=0.01)
    start, right = time.perf_counter(), []
    while (share := (time.perf_counter() - start) / 60 / minutes) < 1:
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1, (step + 1) / 20) * max(0.05, 1 - share)
        chosen = rng.choice(len(pages), batch, replace=False)
        query_inputs = prompts.questions([question(pages[index], int(rng.integers(4))) for index in chosen])
        vectors = embed(model, prompts, encoded[chosen])
        scores = score(model(**query_inputs).embeddings, query_inputs["attention_mask"].float(), vectors) * scale.exp()
        loss = torch.nn.functional.cross_entropy(scores, torch.arange(batch))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*learned, scale], 1.0)
        optimizer.step()
        right.append((scores.argmax(1) == torch.arange(batch)).float().mean().item())
        step += 1
        if step % 10 == 0:
            print(f"step {step}, {60 * share * minutes:.0f} s, loss {loss.item():.3f}, "
                  f"right {sum(right[-10:]) / 10:.2f}, scale {scale.exp().item():.1f}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=35)
    parser.add_argument("--pages", type=int, default=1200)
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = assemble()
    prompts = Prompts(model)
    train(model, prompts, [draw(TRAIN_SEED, index) for index in range(args.pages)], args.minutes, args.batch)
    model.save_pretrained(args.out)


if __name__ == "__main__":
    main()
