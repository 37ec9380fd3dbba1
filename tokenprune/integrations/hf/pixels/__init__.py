# SPDX-License-Identifier: Apache-2.0
"""An add-on: make a processor do what a method on pixels says, alone or together with a model."""
