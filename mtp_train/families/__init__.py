"""Model families: one record each with everything the rest of the package reads about a family."""

from __future__ import annotations

from mtp_train.families.engines import Convention as Convention
from mtp_train.families.kinds.kind import draft_kind as draft_kind
from mtp_train.families.kinds.kind import kinds_served as kinds_served
from mtp_train.families.kinds.kind import most_served_kind as most_served_kind
from mtp_train.families.kinds.kind import of_kind as of_kind
from mtp_train.families.registry import FAMILIES as FAMILIES
from mtp_train.families.registry import family_for as family_for
from mtp_train.families.registry import family_named as family_named
from mtp_train.families.spec import Family as Family
from mtp_train.families.spec import RawConfig as RawConfig
from mtp_train.families.spec import raw_text_config as raw_text_config
