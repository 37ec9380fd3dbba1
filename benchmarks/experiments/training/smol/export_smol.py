# SPDX-License-Identifier: Apache-2.0
"""Export the shipped parts of demo_smol from a training state: tower, projector, and changes of the decoder.

python experiments/training/smol/export_smol.py --tower runs/demo_smol_tower/state.pt --state runs/demo_smol/state.pt
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from safetensors.torch import save_file

from tokenprune_demo.smol import HERE, assemble, load_decoder
from train_tower_smol import build_tower


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tower", type=Path, default=Path("runs/demo_smol_tower/state.pt"))
    parser.add_argument("--state", type=Path, default=Path("runs/demo_smol/state.pt"))
    parser.add_argument("--out", type=Path, default=HERE)
    args = parser.parse_args()
    state = torch.load(args.state, weights_only=True)
    parts = {f"vision_tower.{name}": w for name, w in torch.load(args.tower, weights_only=True)["tower"].items()}
    parts |= {f"multi_modal_projector.{name}": w for name, w in state["projector"].items()}
    for name, weight in state["adapters"]["weights"].items():
        parts[f"decoder.{name.removeprefix('model.')}"] = weight
    kept = {name: w.to(torch.bfloat16).contiguous() for name, w in parts.items() if w.is_floating_point()}
    args.out.mkdir(parents=True, exist_ok=True)
    fresh = args.out / "parts.safetensors.tmp"
    save_file(kept, fresh)
    os.replace(fresh, args.out / "parts.safetensors")
    model, _ = assemble(*load_decoder(), build_tower().config)
    model.config.architectures = [type(model).__name__]
    model.config.text_config._name_or_path = ""  # remove a path of this machine
    model.config.save_pretrained(args.out)
    print(f"{sum(w.numel() for w in kept.values()) / 1e6:.1f} M numbers in {args.out}")


if __name__ == "__main__":
    main()
