# SPDX-License-Identifier: Apache-2.0
"""vLLM with the plugin on this GPU: answers of small random models beside those of transformers on the CPU.

"equal": tokens that are equal from the first on, or answers; "gap": the largest difference between log-probabilities of
the five likeliest, up to the first token that differs. Compared are requests of each setting with transformers under
the same setting; keep=1.0 with `off`; many requests at once, and again from the caches, with each of them alone; and
vLLM without the plugin. A case's name says the model, vLLM's model runner and how it launches: eagerly (nothing),
"graphs" (CUDA graphs without torch.compile) or "default" (torch.compile). In float32 all are to be equal; in bfloat16
("fa3") near ties may fall to either side.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from kit import Sheet  # isort: skip
from children import rows_of
from vllm_kit.cases import CASES

SECONDS = 150.0  # that a case may take: torch.compile takes more than a minute
TINY = ("llava.v1",)  # the CPU build has no other runner without Triton's interpreter
COLUMNS = {
    "case": "case", "what": "what", "setting": "setting", "dtype": "dtype", "verdict": "verdict",
    "equal": "equal", "of": "of", "gap": "gap", "bound": "ended",
}  # fmt: skip


def main(given: Sequence[str] | None = None) -> int:
    sheet = Sheet("h_vllm_answers", "Answers in vLLM", "tiny models", COLUMNS, __doc__, given)
    for name in TINY if sheet.tiny else CASES:
        run = partial(rows_of, "answers", name, sheet.tiny)
        sheet.take((name,), lambda run=run, name=name: [{"case": name} | row for row in run()], SECONDS)
    return sheet.end()


if __name__ == "__main__":
    raise SystemExit(main())
