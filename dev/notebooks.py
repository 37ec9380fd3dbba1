# SPDX-License-Identifier: Apache-2.0
"""Strip outputs, execution counts and machine data from docs/notebooks/.

python dev/notebooks.py            # strip the files (the test suite checks that all notebooks are stripped)
"""

from __future__ import annotations

import json
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "docs/notebooks"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def stripped(text: str) -> str:
    """Return a notebook without the results of a run."""
    notebook = json.loads(text)
    for cell in notebook["cells"]:
        cell["metadata"] = {}
        if cell["cell_type"] == "code":
            cell |= {"execution_count": None, "outputs": []}
    notebook["metadata"] = METADATA
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def main() -> None:
    for path in sorted(FOLDER.glob("*.ipynb")):
        path.write_text(stripped(path.read_text()))


if __name__ == "__main__":
    main()
