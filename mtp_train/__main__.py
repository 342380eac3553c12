"""``python -m mtp_train RECIPE [section.field=value ...]``: the form that ``accelerate launch -m`` starts."""

from mtp_train.cli.main import main
from mtp_train.train.stopping import leave

if __name__ == "__main__":
    leave(main())
