# SPDX-License-Identifier: Apache-2.0
"""The observables, one a file; importing a module registers what is in it (see `tokenprune.selection.observable`)."""
