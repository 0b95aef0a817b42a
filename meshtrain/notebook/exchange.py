"""How a function exchanges with the other devices: by mt.prepare or by torch.distributed, found in the names that its
code uses.

What libraries find in their environment depends on it (torchrun's variables), before a line of the function runs.
"""

import dis
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

from meshtrain.packing.imports import GROUPS

PREPARE, GROUP = "mt.prepare", "torch.distributed"
ALIASES = frozenset({"mt", "meshtrain"})


def exchange_of(functions: Iterable[FunctionType], texts: Iterable[str], modules: Collection[str]) -> str | None:
    """PREPARE, GROUP, or None where neither is found: then a library of the person's may do it.

    Args:
        functions: all whose code is sent.
        texts: of the person's modules that it uses, which lie beside the notebook.
        modules: that it refers to.
    """
    codes = [(each.__code__, each.__globals__) for each in functions]
    codes += [(code, {}) for code in _compiled(texts)]
    if any(_prepares(code, ALIASES | _names_of(variables)) or _bare(code, variables) for code, variables in codes):
        return PREPARE
    imported = {*modules, *(name for code, _ in codes for name in _imported(code))}
    if any(name == group or name.startswith(f"{group}.") for name in imported for group in GROUPS):
        return GROUP
    return GROUP if any("init_process_group" in each.co_names for code, _ in codes for each in _all_of(code)) else None


def _compiled(texts: Iterable[str]) -> Iterator[CodeType]:
    for text in texts:
        try:
            yield compile(text, "<module>", "exec", dont_inherit=True)
        except (SyntaxError, ValueError):  # its error is told where it runs
            continue


def _names_of(variables: Mapping[str, Any]) -> set[str]:
    """Under which names a notebook knows meshtrain."""
    return {
        name for name, value in variables.items() if isinstance(value, ModuleType) and value.__name__ == "meshtrain"
    }


def _bare(code: CodeType, variables: Mapping[str, Any]) -> bool:
    """Whether it uses `prepare` as it was imported from meshtrain into the notebook."""
    theirs = {
        name
        for name, value in variables.items()
        if getattr(value, "__module__", None) == "meshtrain" and getattr(value, "__name__", None) == "prepare"
    }
    return any(theirs & {*each.co_names} for each in _all_of(code))


def _prepares(code: CodeType, aliases: Collection[str]) -> bool:
    """Whether it says `mt.prepare` or imports `prepare` from meshtrain, in itself or in what is defined within."""
    known = set(aliases)
    imported = before = ""
    for one in dis.get_instructions(code):
        if one.opname == "IMPORT_NAME":
            imported = str(one.argval)
        elif one.opname == "IMPORT_FROM":
            if imported == "meshtrain" and one.argval == "prepare":
                return True
        elif one.opname.startswith("STORE_") and before == "IMPORT_NAME" and imported == "meshtrain":
            known.add(str(one.argval))
        elif one.opname in ("LOAD_ATTR", "LOAD_METHOD") and one.argval == "prepare" and before in known:
            return True
        before = one.opname if one.opname == "IMPORT_NAME" else str(one.argval)
    return any(_prepares(inner, known) for inner in code.co_consts if isinstance(inner, CodeType))


def _imported(code: CodeType) -> Iterator[str]:
    for each in _all_of(code):
        yield from (str(one.argval) for one in dis.get_instructions(each) if one.opname == "IMPORT_NAME")


def _all_of(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _all_of(inner)
