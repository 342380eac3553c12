"""``python -m mtp_train RECIPE [section.field=value ...]``: the form that ``accelerate launch -m`` starts."""

from __future__ import annotations

import sys

from mtp_train.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
