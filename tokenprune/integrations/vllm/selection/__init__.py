# SPDX-License-Identifier: Apache-2.0
"""Call methods on the features of a served request."""
