"""Parameter files: what a sweep runs, validated before anything is built.

A file gives a grid, a list of cases, or both. Everything wrong with it becomes one ``ParamsError``
sentence naming the file, the key, the value and the allowed range. Nothing here touches torch or a
kernel; what a case does with its values is ``m3lab.sweep.cases``.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from m3lab.kernels.stages import until_names
from m3lab.model.shapes import MAX_TOKENS, TP_WIDTHS, ModelShape
from m3lab.sweep.cases import Case, changed_knobs

BACKENDS = ("auto", "interpreter", "hip")
STAGES = until_names()  # the stages a truncated build may end with
MAX_CONTEXT = 1 << 20
REPORT = "20_report"
SWEEP_NOTEBOOKS = {  # executed when a file's cases differ in this
    "tokens": "10_sweep_tokens",
    "context": "11_sweep_context",
    "tp": "12_sweep_tp",
}

# What pydantic's own types are called in a parameter file.
CONTAINERS = {
    "model_type": "a mapping of keys",
    "dict_type": "a mapping of keys",
    "list_type": "a list",
    "string_type": "text",
}


class ParamsError(ValueError):
    """A parameter file that cannot be used: one sentence with file, key, value and range."""


def _integer(low: int, high: int) -> BeforeValidator:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"must be an integer in {low}..{high}")
        return value

    return BeforeValidator(check)


def _one_of(*allowed: Any) -> BeforeValidator:
    def check(value: Any) -> Any:
        if not any(value == a and type(value) is type(a) for a in allowed):
            words = ("null" if a is None else str(a).lower() for a in allowed)
            raise ValueError(f"must be one of {', '.join(words)}")
        return value

    return BeforeValidator(check)


class _KnobError(ValueError):
    """A knob's name and what is wrong with its value, which the text says already."""


def _knobs(value: Any) -> dict[str, Any]:
    """A mapping of ``Tuning``'s knobs; the error says which one is wrong."""
    if not isinstance(value, dict):
        raise ValueError("must be a mapping of knobs such as {score_copies: 1}, {} for the default")
    for name, setting in value.items():
        try:
            changed_knobs({str(name): setting})
        except ValueError as exc:
            raise _KnobError(f"{name}: {str(exc).removeprefix(f'{name} ')}") from None
    return value


def _listed(value: Any) -> Any:
    """A scalar in a grid stands for a list of one."""
    return value if isinstance(value, list) else [value]


Tokens = Annotated[int, _integer(1, MAX_TOKENS)]
Context = Annotated[int, _integer(1, MAX_CONTEXT)]
Tp = Annotated[int, _one_of(*TP_WIDTHS)]
Flag = Annotated[bool, _one_of(False, True)]
Stride = Annotated[int, _one_of(8, 16)]
PadRows = Annotated[int, _integer(0, MAX_TOKENS - 1)]
Stage = Annotated[str | None, _one_of(*STAGES, None)]
Knobs = Annotated[dict[str, Any], BeforeValidator(_knobs)]
Many = BeforeValidator(_listed)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Grid(_Strict):
    """Values per axis; the sweep runs their product. ``solo`` runs one rank with no peer.

    ``tuning``: mappings of ``m3lab.kernels.tuning.Tuning``'s knobs, ``{}`` the defaults.
    ``timeline``: the build stamps its timeline. ``clock``: the run takes modelled times.
    """

    tokens: Annotated[list[Tokens], Many] = [1]
    context: Annotated[list[Context], Many] = [2048]
    tp: Annotated[list[Tp], Many] = [4]
    solo: Annotated[list[Flag], Many] = [False]
    q_len: Annotated[list[Tokens], Many] = [1]
    pad_rows: Annotated[list[PadRows], Many] = [0]
    page_stride: Annotated[list[Stride], Many] = [8]
    static_scale: Annotated[list[Flag], Many] = [False]
    tuning: Annotated[list[Knobs], Many] = [{}]
    timeline: Annotated[list[Flag], Many] = [False]
    clock: Annotated[list[Flag], Many] = [True]


class OneCase(_Strict):
    """One case, written out; the same keys as the grid, one value each."""

    tokens: Tokens = 1
    context: Context = 2048
    tp: Tp = 4
    solo: Flag = False
    q_len: Tokens = 1
    pad_rows: PadRows = 0
    page_stride: Stride = 8
    static_scale: Flag = False
    tuning: Knobs = {}
    timeline: Flag = False
    clock: Flag = True


class Params(_Strict):
    """A whole parameter file. ``until`` null builds every stage; ``model`` overrides ModelShape.

    ``notebooks``: those to execute; ``parse`` fills in the ones that the cases call for.
    """

    title: str = ""
    grid: Grid | None = None
    cases: list[OneCase] = []
    backend: Annotated[str, _one_of(*BACKENDS)] = "auto"
    until: Stage = None
    seed: Annotated[int, _integer(0, 2**31 - 1)] = 0
    repetitions: Annotated[int, _integer(1, 10_000)] = 1
    layers: Annotated[int, _integer(1, 57)] = 1
    checks: Flag = True
    timeout_s: Annotated[int, _integer(1, 86_400)] = 900
    model: dict[str, Any] = {}
    notebooks: list[str] | None = None

    def expand(self) -> list[Case]:
        """Every case of the grid and the list, in file order, each once.

        ValueError (one sentence) for a combination that no build takes.
        """
        chosen: list[dict[str, Any]] = []
        if self.grid is not None:
            axes = self.grid.model_dump()
            chosen += [
                dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())
            ]
        chosen += [case.model_dump() for case in self.cases]
        shared = self.model_dump(
            include={
                "backend",
                "until",
                "seed",
                "repetitions",
                "layers",
                "checks",
                "timeout_s",
                "model",
            }
        )
        model = tuple(sorted(shared.pop("model").items()))
        cases = [
            Case(**(values | {"tuning": changed_knobs(values["tuning"])}), **shared, model=model)
            for values in chosen
        ]
        return list({case.key: case for case in cases}.values())


def load(path: str | Path) -> Params:
    """The validated parameters in ``path`` (YAML); ParamsError is one sentence on what is wrong."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as exc:
        raise ParamsError(
            f"{path}: cannot read the parameter file ({exc.strerror or exc})"
        ) from exc
    except UnicodeDecodeError as exc:
        raise ParamsError(
            f"{path}: must be UTF-8 text, byte {exc.start} is {exc.object[exc.start]:#x}"
        ) from exc
    try:
        data = yaml.load(text, _UniqueKeys)
    except yaml.YAMLError as exc:
        mark = getattr(exc, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        problem = getattr(exc, "problem", None) or "malformed"
        raise ParamsError(f"{path}: not valid YAML{where}: {problem}") from exc
    if not isinstance(data, dict):
        given = "an empty file" if data is None else repr(data)[:80]
        raise ParamsError(
            f"{path}: must be a mapping of keys such as grid, cases, seed; got {given}"
        )
    return parse(data, str(path))


class _UniqueKeys(yaml.SafeLoader):
    """Plain YAML, but a key given twice is an error: YAML would drop the first one silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key.value!r} is given twice", key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def parse(data: dict[str, Any], source: str) -> Params:
    """``data`` as Params; ``source`` names it in errors."""
    try:
        params = Params.model_validate(data)
    except ValidationError as exc:
        raise ParamsError(_sentence(exc, source)) from None
    if params.grid is None and not params.cases:
        raise ParamsError(f"{source}: names no case: give a grid, a list of cases, or both")
    if params.grid is not None:
        for key, values in params.grid.model_dump().items():
            if not values:
                raise ParamsError(f"{source}: grid.{key}: needs at least one value, got []")
    _check_model(params.model, source)
    try:
        cases = params.expand()
    except ValueError as exc:
        raise ParamsError(f"{source}: {exc}") from None
    if params.notebooks is None:
        return params.model_copy(update={"notebooks": notebooks_for(cases)})
    return params


def notebooks_for(cases: list[Case]) -> list[str]:
    """The notebooks of what ``cases`` differ in, and the report."""
    varied = [n for key, n in SWEEP_NOTEBOOKS.items() if len({getattr(c, key) for c in cases}) > 1]
    return [*varied, REPORT]


def _check_model(model: dict[str, Any], source: str) -> None:
    known = ModelShape.__dataclass_fields__
    for key in model:
        if key not in known:
            raise ParamsError(
                f"{source}: model.{key}: unknown key; known keys are {', '.join(known)}"
            )
        number = int if isinstance(known[key].default, int) else (int, float)
        if isinstance(model[key], bool) or not isinstance(model[key], number):
            kind = "an integer" if number is int else "a number"
            raise ParamsError(f"{source}: model.{key}: must be {kind}, got {model[key]!r}")
    try:
        ModelShape(**model)
    except (TypeError, ValueError) as exc:
        raise ParamsError(f"{source}: model: {exc}") from None


def _sentence(exc: ValidationError, source: str) -> str:
    errors = exc.errors()
    first = errors[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        sections: dict[str, type[_Strict]] = {"grid": Grid, "cases": OneCase}
        nested = len(first["loc"]) > 1
        section = sections.get(str(first["loc"][0]), Params) if nested else Params
        known = ", ".join(section.model_fields)
        text = f"{source}: {key}: unknown key (value {first['input']!r}); known keys are {known}"
    elif first["type"] == "value_error" and isinstance(first["ctx"]["error"], _KnobError):
        text = f"{source}: {key}.{first['ctx']['error']}"
    elif first["type"] == "value_error":
        text = f"{source}: {key}: {first['ctx']['error']}, got {first['input']!r}"
    elif first["type"] in CONTAINERS:
        text = f"{source}: {key}: must be {CONTAINERS[first['type']]}, got {first['input']!r}"
    else:
        text = f"{source}: {key}: {first['msg'].lower()}, got {first['input']!r}"
    more = len(errors) - 1
    return text + (f" (and {more} more problem{'s' * (more > 1)})" if more else "")
