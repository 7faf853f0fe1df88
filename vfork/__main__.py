# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""`python -m vfork`."""

import gc
import sys

from vfork.cli import main

status = main()
# What lives until here need not be searched for cycles on the way out: after a rebase
# that would take as long as the report.
gc.freeze()
sys.exit(status)
