# SPDX-License-Identifier: Apache-2.0
"""Store the printed and drawn outputs of a notebook for its page on the site.

The notebook itself is committed without outputs.

python dev/notebook_outputs.py tour    # runs docs/notebooks/tour.ipynb, writes docs/images/tour/CELL.txt and CELL.webp

dev/mkdocs_hooks.py shows the outputs of each notebook with such a folder. Run the script again after a change of the
notebook's code; a test compares the code with the digest in the folder.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUTPUTS = ROOT / "docs/images"
WIDTH, QUALITY = 1200, 72


def digest(cells: Iterable[Any]) -> str:
    """Return a digest of the code of a notebook's cells."""
    code = ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    return hashlib.sha256("\n\n".join(code).encode()).hexdigest()[:16] + "\n"


def shown(folder: Path, cell: dict[str, Any]) -> str:
    """Return the stored outputs of a cell as Markdown: its image, and its text in a fence. "" without outputs."""
    text, image = (folder / f"{cell['id']}.{ending}" for ending in ("txt", "webp"))
    parts = [f"```text\n{text.read_text().rstrip()}\n```"] if text.is_file() else []
    if image.is_file():
        parts.append(f"![Output of the cell above](../images/{folder.name}/{image.name}){{ loading=lazy }}")
    return "\n\n".join(parts)


def save(folder: Path, cell: Any) -> None:
    """Write the printed text of a cell, and its last image."""
    from PIL import Image

    printed = "".join(out.text for out in cell.outputs if out.output_type == "stream" and out.name == "stdout")
    for data in (out.data for out in cell.outputs if "data" in out):
        if "image/png" not in data:
            printed += data.get("text/plain", "") + "\n"
            continue
        image = Image.open(io.BytesIO(base64.b64decode(data["image/png"]))).convert("RGB")
        image.thumbnail((WIDTH, 2 * WIDTH))
        image.save(folder / f"{cell.id}.webp", quality=QUALITY, method=6)
    if printed.strip():
        (folder / f"{cell.id}.txt").write_text(printed.rstrip() + "\n")


def main() -> None:
    import nbclient
    import nbformat

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="a notebook of docs/notebooks/, without its ending")
    name = parser.parse_args().name
    notebook = nbformat.read(ROOT / f"docs/notebooks/{name}.ipynb", 4)
    nbclient.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(ROOT / "docs/notebooks")}}
    ).execute()
    folder = OUTPUTS / name
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            save(folder, cell)
    (folder / "code.sha256").write_text(digest(notebook.cells))


if __name__ == "__main__":
    main()
