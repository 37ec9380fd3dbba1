# SPDX-License-Identifier: Apache-2.0
"""Built-in observables. Importing a module registers its observables. See `tokenprune.selection.observable`."""
