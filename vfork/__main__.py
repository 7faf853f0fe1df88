# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""`python -m vfork`."""

import sys

from vfork.cli import main

sys.exit(main())
