"""quantized_init: store the weight of each layer in 8 bits as the layer is made."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from tritonfp8.conversion.model import apply_selection, for_storage, revert
from tritonfp8.conversion.selection import Selection, linears, select, sizes_of
from tritonfp8.conversion.sharing import share_inputs
from tritonfp8.layers import record_names
from tritonfp8.layers.linear import computes_linear, is_conv1d, is_converted
from tritonfp8.layers.moe import class_of_experts
from tritonfp8.layers.stored import stored_part, taken
from tritonfp8.recipes import Recipe, get

Filter = Callable[[nn.Module, str], bool] | None


class _Block:
    """The layers that one ``with`` block makes."""

    def __init__(self, recipe: Recipe, filter: Filter) -> None:
        self.recipe, self.filter = recipe, filter
        # With what removes the hooks of each.
        self.parents: dict[nn.Module, list[RemovableHandle]] = {}
        self.children: set[nn.Module] = set()
        self.made: dict[nn.Module, dict[str, nn.Module]] = {}
        self.on_meta: set[nn.Module] = set()
        self.is_settled = True

    def on_child(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        """A module becomes a child of another."""
        if child is None:
            return
        self.is_settled = False
        self.children.add(child)
        if parent not in self.parents:
            of_load = parent.register_load_state_dict_pre_hook(_settle_open)
            self.parents[parent] = [of_load, parent.register_state_dict_pre_hook(_settle_open)]
        if class_of_experts(child) is not None or _is_linear(child):
            self.store(parent, name, child, self.filter)

    def store(self, parent: nn.Module, name: str, child: nn.Module, filter: Filter) -> None:
        """Store the weight of a layer if it is chosen."""
        holder = nn.Module()
        holder._modules[name] = child
        selected = select(holder, self.recipe, filter, 1)
        if not selected.modules and (is_converted(child) or not selected.already):
            return
        storage = for_storage(holder, selected, "inference", on_meta=True)
        if storage.unstored:
            # A later call of convert names the reason.
            return
        apply_selection(holder, storage, True)
        self.made.setdefault(parent, {})[name] = child
        if is_converted(child):
            child.on_assign = _assigned
            if child._parameters["weight"].is_meta:  # type: ignore[union-attr]
                self.on_meta.add(child)

    def settle(self, at_the_end: bool = False) -> None:
        """Decide by the models that there are now, in which each layer has its place and its name."""
        if self.is_settled or self.filter is not None:
            return
        self.is_settled = True
        for root in [parent for parent in self.parents if parent not in self.children]:
            selection, modules = Selection(root, None, 1), dict(root.named_modules())
            for name, layer in list(linears(root)):
                parent, _, key = name.rpartition(".")
                if not _is_linear(layer) or modules[parent] not in self.parents:
                    continue
                made = layer in self.made.get(modules[parent], {}).values()
                reason = selection.reason(name, layer, sizes_of(layer), ("*", self.recipe))
                if reason is None and not is_converted(layer):
                    self.store(modules[parent], key, layer, lambda *others: True)
                elif reason is not None and made:
                    self.give_back(name, layer, at_the_end)

    def give_back(self, name: str, layer: nn.Module, at_the_end: bool = False) -> None:
        """Give a layer a plain weight again."""
        if at_the_end and layer in self.on_meta and not layer._parameters["weight"].is_meta:  # type: ignore[union-attr]
            warnings.warn(
                f"{name} stays in high precision, and its weight was loaded while it was stored in 8 bits: its values "
                "are rounded. Load them after the block of quantized_init",
                stacklevel=5,
            )
        revert(layer)
        layer.requires_grad_()
        for each in self.made.values():
            for key in [key for key, child in each.items() if child is layer]:
                del each[key]

    def is_tied(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter is the weight of an embedding."""
        modules = (module for parent in self.parents for module in parent.modules())
        return any(isinstance(m, nn.Embedding) and m._parameters["weight"] is parameter for m in modules)

    def close(self) -> None:
        """The block ends."""
        for handles in self.parents.values():
            for handle in handles:
                handle.remove()


def _is_linear(module: nn.Module) -> bool:
    return is_converted(module) or computes_linear(type(module)) or is_conv1d(module)


_open: list[_Block] = []


def _settle_open(*arguments: object) -> None:
    # A function of the module, as a copy of a model may keep it: pickle must find it.
    for block in _open:
        block.settle()


def _assigned(layer: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
    """Takes a Parameter that is assigned to a layer, which may turn out to stay in high precision."""
    _settle_open()
    for block in _open:
        if name == "weight" and stored_part(layer._parameters.get(name)) is not None and block.is_tied(parameter):
            block.give_back(name, layer)
    return taken(layer, name, parameter)


@contextmanager
def quantized_init(recipe: str | Recipe, filter: Filter = None) -> Iterator[None]:
    """Store the weights of linear layers and experts in 8 bits as they are made, for models that never fit in bfloat16.

    A layer is converted when it becomes a child of a module, as by ``convert(mode="inference")``; its weight in high
    precision is freed then. On the meta device no weight is ever in memory: ``fully_shard`` the model,
    ``to_empty(device=...)``, then load a checkpoint, or call ``reset_parameters`` of its layers::

        with tritonfp8.quantized_init("rowwise"), torch.device("meta"):
            model = Model()

    Modules that are made in other threads meanwhile are converted, too.

    Args:
        recipe: a name or a :class:`~tritonfp8.Recipe`, of all layers.
        filter: ``filter(layer, name) -> bool``, of the name of a layer in its parent; by default the choice of
            :func:`convert`. What the model tells of its layers is known once it is made: before a checkpoint is loaded,
            or at the end of the block, layers that stay in high precision get plain weights again.

    Raises:
        ValueError: the block made no layer to store, or an unfit weight (float16); names the layer.
        TypeError: an argument of another type.
    """
    if filter is not None and not callable(filter):
        raise TypeError(f"filter must be a function of a layer and its name, or None; got {type(filter).__name__}")
    block = _Block(get(recipe), filter)
    handle = register_module_module_registration_hook(block.on_child)
    _open.append(block)
    try:
        yield
        block.settle(at_the_end=True)
    finally:
        handle.remove()
        _open.remove(block)
        block.close()
    if not any(block.made.values()):
        raise ValueError("no layer was made inside quantized_init whose weight could be stored: make the model inside")
    for parent, layers in block.made.items():
        of_linears = [layer for layer in layers.values() if class_of_experts(layer) is None]
        share_inputs(parent, of_linears, of_linears)
        record_names(parent, layers)
