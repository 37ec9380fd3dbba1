# SPDX-License-Identifier: Apache-2.0
"""Run README's code, load the models named in README, and run `tokenprune demo`.

python dev/try_readme.py    # in the checkout, with the Python of an environment installed as README describes

Exits with 1 if a step fails.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The shipped demo_qwen, and a folder as a checkpoint of Qwen2.5-VL is one: a tiny model with its processor. Both
# processors need torchvision, and `device_map` needs accelerate.
LOAD = """
import sys, tempfile
sys.path.insert(0, "tests/unit/support")
import tokenprune
from PIL import Image
from tiny_video_model import write_tiny_video_model
from transformers import AutoModelForImageTextToText, AutoProcessor

image = Image.new("RGB", (224, 224), "teal")

def ask(model, processor):
    tokenprune.patch(model, "divprune", keep=0.25)
    content = [{"type": "image"}, {"type": "text", "text": "what does the sign say?"}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = processor(images=image, text=text, return_tensors="pt")
    model.generate(**inputs, max_new_tokens=2)
    stats = tokenprune.stats(model)
    print(type(processor).__name__, stats.visual_tokens_in, "to", stats.visual_tokens_out, "tokens")

ask(*tokenprune.demo_model("demo_qwen", device="cpu"))
with tempfile.TemporaryDirectory() as folder:
    write_tiny_video_model(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, device_map="cpu")
    ask(model, AutoProcessor.from_pretrained(folder))
"""


def run(*command: str) -> str:
    """Return the output of a command. Exits if the command fails."""
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}\n{command[:2]} ended with {done.returncode}")
    return done.stdout


def main() -> None:
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    promised = code.rpartition("# prints: ")[2].strip()
    if (printed := run(sys.executable, "-c", code).strip()) != promised:
        sys.exit(f"README's code prints {printed!r}, and README says {promised!r}")
    print(printed)
    print(run(sys.executable, "-c", LOAD))
    print(run(str(Path(sys.executable).with_name("tokenprune")), "demo"))


if __name__ == "__main__":
    main()
