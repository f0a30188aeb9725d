"""The argument of ``--decompose``: text, or a file of ranks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pimflow.core.table_files import read_toml
from pimflow.decomposition.factors import METHODS
from pimflow.decomposition.ranks import RankRule
from pimflow.errors import DecompositionError, UnknownNameError, UsageError, hint

# Values of each option.
_OPTIONS = {"first": ("keep", "decompose"), "fc": ("keep", "decompose"), "where": ("all", "pays")}


@dataclass(frozen=True, kw_only=True)
class DecompositionRequest:
    """Which layers are decomposed, by which method, and to which ranks.

    Attributes
    ----------
    method : str
        ``tucker``, ``cp`` or ``tt``.
    rules : tuple of RankRule
        For all layers. If there are several, each layer has an alternative a rule, and a search chooses one.
        Empty if a file gives `layers`.
    layers : dict of str to RankRule
        The rule of each layer to decompose, if there are no `rules`.
    path : str
        The file that gives `layers`.
    fc : bool
        Whether products with constant matrices are decomposed.
    where : str
        ``all``: all requested layers; ``pays``: those for which a search finds the chain cheaper.
    """

    text: str
    method: str
    rules: tuple[RankRule, ...]
    layers: dict[str, RankRule]
    path: str = ""
    first: bool = True
    fc: bool = False
    where: str = "all"

    @classmethod
    def parse(cls, text: str) -> DecompositionRequest:
        """Parse ``METHOD:RANK[:RANK...][,first=keep][,fc=decompose][,where=pays]``.

        RANK is a ratio in (0, 1], ``energy=SHARE``, ``vbmf``, or a ``.toml`` file with a line for each layer
        to decompose: a ratio, ``"energy=SHARE"``, ``"vbmf"``, a rank, or a list of ranks. Several RANKs need
        ``where=pays``, and a search chooses one for each layer.

        Raises
        ------
        UnknownNameError, UsageError
            If the text has another form.
        DecompositionError
            If the file cannot be read, or its contents have another form.
        """
        head, *options = text.split(",")
        method, colon, rank = head.partition(":")
        if method not in METHODS:
            raise UnknownNameError("decomposition", method, METHODS)
        if not colon or not rank:
            raise UsageError(f"decomposition '{text}': no rank; give for example {method}:0.1")
        settings: dict[str, str] = {}
        for option in options:
            name, _, value = option.partition("=")
            if name not in _OPTIONS:
                raise UsageError(f"decomposition '{text}': unknown option '{name}'; {hint(name, _OPTIONS)}")
            if value not in _OPTIONS[name] or name in settings:
                raise UsageError(
                    f"decomposition '{text}': give {name} once, as one of {', '.join(_OPTIONS[name])}"
                )
            settings[name] = value
        from_file = rank.endswith(".toml")
        if from_file and (misplaced := [name for name in settings if name != "where"]):
            raise UsageError(
                f"decomposition '{text}': the file names the layers; leave out {', '.join(misplaced)}"
            )
        rules = () if from_file else tuple(RankRule.parse(item) for item in rank.split(":"))
        if duplicates := [item.text for item in rules if rules.count(item) > 1]:
            raise UsageError(f"decomposition '{text}': rank {duplicates[0]} occurs twice")
        if len(rules) > 1 and settings.get("where") != "pays":
            raise UsageError(
                f"decomposition '{text}': of several ranks a search chooses one for each layer: give "
                "where=pays too, or one rank"
            )
        return cls(
            text=text,
            method=method,
            rules=rules,
            layers=_read_rules(rank) if from_file else {},
            path=rank if from_file else "",
            first=settings.get("first") != "keep",
            fc=settings.get("fc") == "decompose",
            where=settings.get("where", "all"),
        )

    def require_layers(self, layer_names: Collection[str]) -> None:
        """Raise `DecompositionError` if the file names a layer that is not in `layer_names`."""
        for name in self.layers:
            if name not in layer_names:
                raise DecompositionError(
                    f"{self.path}: no layer '{name}' to decompose; {hint(name, layer_names)}"
                )


def _read_rules(path: str) -> dict[str, RankRule]:
    table = read_toml(path, DecompositionError)
    if not table:
        raise DecompositionError(f'{path}: names no layer; give lines such as "conv1" = [6, 6]')
    return {name: _parse_rule(f"{path}: layer '{name}'", value) for name, value in table.items()}


def _parse_rule(where: str, value: object) -> RankRule:
    if isinstance(value, dict):
        raise DecompositionError(f"{where} is a table; put a name with dots in quotes")
    values = value if isinstance(value, list) else [value]
    if values and all(type(item) is int for item in values):
        if min(values) < 1:
            raise DecompositionError(f"{where}: rank {min(values)} is below 1")
        return RankRule(kind="ranks", ranks=tuple(values))
    if type(value) is float or isinstance(value, str):
        try:
            return RankRule.parse(str(value))
        except UsageError as error:
            raise DecompositionError(f"{where}: {error}") from error
    raise DecompositionError(
        f'{where}: {value!r} is no rank; give a ratio, "energy=SHARE", "vbmf", a rank, or a list of ranks'
    )
