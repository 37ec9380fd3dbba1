# SPDX-License-Identifier: Apache-2.0
"""Export a training state's checkpoint: python experiments/training/qwen/export_qwen.py [state.pt] [folder] [dtype].

dtype is the storage dtype of the file (float32 or bfloat16). The weights are loaded as float32 in any case.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from qwen_model import build_model, export


def main() -> None:
    state = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo_qwen/state.pt")
    folder = Path(sys.argv[2] if len(sys.argv) > 2 else "demo/tokenprune_demo/models/demo_qwen")
    model = build_model()
    model.load_state_dict(torch.load(state)["model"])
    export(model.to(getattr(torch, sys.argv[3] if len(sys.argv) > 3 else "float32")), folder)


if __name__ == "__main__":
    main()
