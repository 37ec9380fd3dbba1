# SPDX-License-Identifier: Apache-2.0
"""Starting point for a model and a task, from a table of advice and its evidence."""
