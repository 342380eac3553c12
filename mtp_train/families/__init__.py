"""Model families: one record each with everything the rest of the package reads about a family."""

from mtp_train.families.engines import Convention as Convention
from mtp_train.families.kinds.kind import (
    draft_kind as draft_kind,
    kinds_served as kinds_served,
    most_served_kind as most_served_kind,
    of_kind as of_kind,
)
from mtp_train.families.registry import FAMILIES as FAMILIES, family_for as family_for, family_named as family_named
from mtp_train.families.spec import Family as Family, RawConfig as RawConfig, raw_text_config as raw_text_config
