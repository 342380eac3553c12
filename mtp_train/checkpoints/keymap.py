"""Map native head keys to our parameter names and back, with one table for each family.

Ours are the parameter names of ``MtpHead`` (``blocks.0.proj.weight``). Every native key under the head's prefixes is
mapped to one of them, shared with the trunk, or unknown. Loading a head with an unknown key is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from mtp_train.families.spec import Family, KeyRule

_NUMBERS = ("module", "layer", "expert", "sub", "last")
REDUCED_OUTPUT = re.compile(r"(?:.+\.)?(?:draft_lm_head|lm_head_draft|draft_vocab_ids|d2t|t2d)(?:\..+)?")
"""Keys of an output matrix of fewer tokens, with which some engines draft instead of the lm_head. It is stored
beside the head, and is no part of it."""


class Mapped(NamedTuple):
    """The meaning of a native key: parameter ``ours``, or a part of it."""

    ours: str
    place: int
    """Number of the rule: parts by several rules are concatenated in the order of the rules."""
    expert: int | None
    """Number of an expert whose tensor is stored alone."""


@dataclass(frozen=True)
class HeadLayout:
    """The native keys of a head in one checkpoint: the family's table with the numbers of this checkpoint."""

    family: Family
    trunk_prefix: str
    num_hidden_layers: int
    num_sublayers: int = 1
    fused_experts: bool = False
    """Whether the head's experts are stored stacked, as our parameters are, instead of one by one."""
    lm_head_prefix: str = ""
    """The prefix that a wrapper adds to the key of the trunk's lm_head."""

    @cached_property
    def _rules(self) -> list[tuple[KeyRule, re.Pattern[str], re.Pattern[str]]]:
        rules = [rule for rule in self.family.keys.rules if not (self.fused_experts and rule.for_each_expert)]
        return [(rule, self._pattern(rule.native), self._pattern(rule.ours)) for rule in rules]

    @cached_property
    def _prefixes(self) -> list[re.Pattern[str]]:
        return [self._pattern(prefix + "{rest}") for prefix in self.family.keys.head_prefixes]

    @cached_property
    def _shared(self) -> list[tuple[str, re.Pattern[str]]]:
        return [(trunk, self._pattern(native)) for native, trunk in self.family.keys.shared.items()]

    def _pattern(self, template: str) -> re.Pattern[str]:
        pattern = re.escape(template).replace(r"\{", "{").replace(r"\}", "}")
        pattern = pattern.replace("{trunk}", re.escape(self.trunk_prefix)).replace("{rest}", "(?P<rest>.+)")
        for name in _NUMBERS:
            pattern = pattern.replace(f"{{{name}}}", rf"(?P<{name}>\d+)")
        return re.compile(pattern + r"\Z")

    def _module(self, match: re.Match[str]) -> int:
        groups = match.groupdict()
        if groups.get("layer") is not None:
            return int(groups["layer"]) - self.num_hidden_layers
        return int(groups.get("module") or 0)

    @property
    def embed_key(self) -> str:
        return self.family.embedding(self.trunk_prefix)

    @property
    def embed_norm_key(self) -> str | None:
        """The native key of a norm of the trunk's embedding; None for a family without one."""
        norm = self.family.keys.embed_norm
        return None if norm is None else norm.format(trunk=self.trunk_prefix)

    @property
    def final_norm_key(self) -> str:
        """The native key of the norm after the trunk's last layer."""
        return f"{self.trunk_prefix}{self.family.trunk.final_norm}.weight"

    @property
    def lm_head_key(self) -> str:
        """The native key of the trunk's lm_head, where it is stored."""
        return self.lm_head_prefix + self.family.keys.lm_head

    def trunk_layer_keys(self, layer: int, tail: str) -> list[str]:
        """Return the native keys of a trunk layer's tensor, if rules describe it; else an empty list.

        The rules are the trunk's own, or the rules of a head that is stored as one more layer. Several keys are parts
        of the tensor's rows, in order. ``{expert}`` stays in a key that exists once for each expert.

        Args:
            tail: The tensor's name in transformers' layer.
        """
        for rules in (self.family.keys.trunk_rules, [rule for rule, _, _ in self._rules]):
            numbered = [rule for rule in rules if "{layer}" in rule.native]
            found = [(rule, match) for rule in numbered if (match := self._pattern(rule.ours).match(f"layer.{tail}"))]
            if found:
                first, match = found[0]
                places = {**match.groupdict(), "trunk": self.trunk_prefix, "layer": layer, "expert": "{expert}"}
                return [rule.native.format(**places) for rule, _ in found if rule.ours == first.ours]
        return []

    def same_in_trunk(self, key: str, layer: int) -> str | None:
        """Return the native key of the trunk layer's tensor that corresponds to a tensor of the head's layer.

        None where the key is not in the head's layer, or where the rules do not give both the same names.
        """
        mapped = self.map_key(key)
        alike = next((native for rule, native, _ in self._rules if rule.ours == "layer.{rest}"), None)
        if mapped is None or alike is None or mapped.ours.split(".")[2] != "layer":
            return None
        match = alike.match(key)
        return None if match is None else f"{self.trunk_prefix}layers.{layer}.{match['rest']}"

    def is_head_key(self, key: str) -> bool:
        """Return whether a native key belongs to the head, mapped or unknown."""
        if REDUCED_OUTPUT.fullmatch(key):
            return False
        matches = (pattern.match(key) for pattern in self._prefixes)
        return any(match is not None and self._module(match) >= 0 for match in matches)

    def shared_key(self, key: str) -> str | None:
        """Return the trunk's key that a head key repeats, as the family's record has it, or None."""
        return next((trunk for trunk, pattern in self._shared if pattern.match(key)), None)

    def shared_module(self, key: str) -> int:
        """Return the index of the module that a key shared with the trunk belongs to."""
        return next(self._module(match) for _, pattern in self._shared if (match := pattern.match(key)))

    def trunk_key(self, shared: str, trunk_keys: Iterable[str]) -> str:
        """Return the trunk key whose tensor is copied to a shared key, from the result of :meth:`shared_key`."""
        key = shared.format(trunk=self.trunk_prefix)
        if key == self.family.keys.lm_head:
            key = self.lm_head_key
        return key if key in set(trunk_keys) else self.embed_key

    def map_key(self, key: str) -> Mapped | None:
        """Return the meaning of a native key, or None where no rule matches it."""
        for place, (rule, pattern, _) in enumerate(self._rules):
            match = pattern.match(key)
            if match is None:
                continue
            groups = match.groupdict()
            ours = f"blocks.{self._module(match)}.{rule.ours.format(**groups)}"
            return Mapped(ours, place, int(groups["expert"]) if groups.get("expert") is not None else None)
        return None

    def parts_of(self, mapped: Mapped) -> tuple[int, int]:
        """Return the number of a tensor among those that are concatenated to its parameter, and their count."""
        ours = self._rules[mapped.place][0].ours
        places = [place for place, (rule, _, _) in enumerate(self._rules) if rule.ours == ours]
        return places.index(mapped.place), len(places)

    def renamed(self, key: str, target: HeadLayout) -> str:
        """Return a head key's name in another checkpoint of the family.

        The other may have another decoder prefix, and a pruned trunk has fewer layers before the head.
        """
        prefixes = "".join(self.family.keys.head_prefixes)
        name = key.removeprefix(self.trunk_prefix)
        if name == key or "{trunk}" not in prefixes:
            return key
        if "{layer}" in prefixes:
            shift = target.num_hidden_layers - self.num_hidden_layers
            name = re.sub(r"(?<=\Alayers\.)\d+", lambda number: str(int(number[0]) + shift), name)
        return target.trunk_prefix + name

    def native_shapes(self, state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
        """Return the native keys of a head's state dict, each with its shape."""
        return {key: tuple(part.shape) for name, value in state.items() for key, part in self.split(name, value)}

    def split(self, name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the native keys of one of our parameters with their values (views where possible)."""
        _, module, tail = name.split(".", 2)
        found = [(rule, match) for rule, _, ours in self._rules if (match := ours.match(tail)) is not None]
        rules = [rule for rule, _ in found if rule.ours == found[0][0].ours]
        placeholders = {
            **found[0][1].groupdict(),
            "trunk": self.trunk_prefix,
            "module": int(module),
            "layer": self.num_hidden_layers + int(module),
            "last": self.num_sublayers - 1,
        }
        parts = value.chunk(len(rules), dim=-2) if len(rules) > 1 else [value]
        for rule, part in zip(rules, parts, strict=True):
            if not rule.for_each_expert:
                yield rule.native.format(**placeholders), part
                continue
            for expert, piece in enumerate(part):
                yield rule.native.format(**placeholders, expert=expert), piece

    def join(self, native: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert native tensors to our parameters, without shared keys. The inverse of ``split``."""
        found: dict[str, dict[int, dict[int, Tensor]]] = {}
        for key, value in native.items():
            mapped = None if self.shared_key(key) else self.map_key(key)
            if mapped is not None:
                found.setdefault(mapped.ours, {}).setdefault(mapped.place, {})[mapped.expert or 0] = value
        return {name: self._joined(pieces) for name, pieces in found.items()}

    def _joined(self, pieces: Mapping[int, Mapping[int, Tensor]]) -> Tensor:
        parts = []
        for place in sorted(pieces):
            experts = [pieces[place][number] for number in sorted(pieces[place])]
            parts.append(torch.stack(experts) if self._rules[place][0].for_each_expert else experts[0])
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)
