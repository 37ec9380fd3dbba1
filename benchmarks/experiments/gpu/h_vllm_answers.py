# SPDX-License-Identifier: Apache-2.0
"""Compare answers of small random models in vLLM with the plugin on this GPU with transformers on the CPU.

"equal" is the number of equal tokens from the start, or of equal answers. "gap" is the maximum difference of
log-probabilities of the five most likely tokens, up to the first different token. Comparisons: each setting with
transformers under the same setting; keep=1.0 with `off`; many concurrent requests, new and cached, with each request by
itself; and vLLM without the plugin. A case's name has the model, vLLM's model runner, and the launch mode: eager
(no suffix), "graphs" (CUDA graphs without torch.compile) or "default" (torch.compile). In float32, all must be equal.
In bfloat16 ("fa3"), near ties may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from kit import Sheet  # isort: skip
from children import rows_of
from vllm_kit.cases import CASES

SECONDS = 150.0  # maximum per case: torch.compile takes more than a minute
TINY = ("llava.v1",)  # the CPU build supports the other runner only with Triton's interpreter
COLUMNS = {
    "case": "case", "what": "what", "setting": "setting", "dtype": "dtype", "verdict": "verdict",
    "equal": "equal", "of": "of", "gap": "gap", "bound": "ended",
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    sheet = Sheet("h_vllm_answers", "Answers in vLLM", "tiny models", COLUMNS, __doc__, argv)
    for name in TINY if sheet.tiny else CASES:
        run = partial(rows_of, "answers", name, sheet.tiny)
        sheet.take((name,), lambda run=run, name=name: [{"case": name} | row for row in run()], SECONDS)
    return sheet.end()


if __name__ == "__main__":
    raise SystemExit(main())
