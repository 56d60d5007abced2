"""Which parts of a model have their weights gathered one by one."""

from __future__ import annotations

from collections import Counter

from torch import nn

_PART_OF_A_MODEL = 100  # smaller blocks are gathered with what surrounds them ...
_ALWAYS_WORTH_IT = 2**20  # ... unless they have as many weights as this


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks that a model repeats, by name: modules in a list or a sequence (``nn.ModuleList``, ``nn.Sequential``)
    that are called, of a class of which there are several in such places. None lies in another one."""
    candidates = {
        name: block
        for name, block in model.named_modules()
        if name and isinstance(model.get_submodule(name.rpartition(".")[0]), nn.ModuleList | nn.Sequential)
    }
    repeats = Counter(type(block) for block in candidates.values())
    enough = min(_size(model) // _PART_OF_A_MODEL, _ALWAYS_WORTH_IT)
    chosen: dict[str, nn.Module] = {}
    for name, block in candidates.items():  # outer modules come before those inside them
        is_inside = any(name.startswith(f"{outer}.") for outer in chosen)
        if not is_inside and repeats[type(block)] > 1 and _is_called(block) and _size(block) > enough:
            chosen[name] = block
    return chosen


def _is_called(module: nn.Module) -> bool:
    """Whether it computes something with modules of its own. A list only holds modules that another one calls. A single
    layer is no block: models look at the type of its weights before they call it."""
    return type(module).forward is not nn.Module.forward and any(True for _ in module.children())


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
