# SPDX-License-Identifier: Apache-2.0
"""An add-on: a draft that sees fewer visual tokens writes ahead, and the model checks it (docs/guides/drafts.md)."""
