"""What is recorded of an operator: its inputs before it runs, what it wrote and returned after.

In:  an operator, or code that may bypass the dispatcher, with its arguments and its result.
Out: events of the module (or parameter) it works for.

A tensor that nobody wrote since it was last hashed is not hashed again: the recorder knows from
`storages.py`, which is kept up to date here. What newcomers get wrong: an operator that is not
recorded (another module, a view, a bypassed one) may still write, so it has to be followed too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from upguard_plugin.capture import contents, padding
from upguard_plugin.capture.collectives.under_way import UnderWay
from upguard_plugin.capture.extents import extent_of
from upguard_plugin.capture.operators import blanks
from upguard_plugin.capture.operators.arguments import (
    Argument,
    tensors_at,
    tensors_given,
    tensors_returned,
)
from upguard_plugin.capture.operators.blanks import Blank
from upguard_plugin.capture.operators.early import look_for_use
from upguard_plugin.capture.operators.locator import Locator
from upguard_plugin.capture.operators.places import Place
from upguard_plugin.capture.operators.schema import Operator, describe, opaque_operator
from upguard_plugin.capture.operators.sites import Site, Sites
from upguard_plugin.capture.probe import Host
from upguard_plugin.capture.rng import default_generator, generator_state
from upguard_plugin.capture.shield import ignore, out_of_sight, shielded
from upguard_plugin.capture.storages import Storages
from upguard_plugin.trace.batch import NONE

_RNG_SLOT = "generator"


@dataclass(slots=True)
class Running:
    """An operator between its inputs and its outputs."""

    operator: Operator
    arguments: list[Argument]
    place: Place
    phase: str
    site: Site | None = None  # None: it is followed, not recorded
    call: int = 0
    element_sites: tuple[Site, ...] = ()  # of a `_foreach_` operator: whom each element is for


class OperatorCalls:
    """Records the operators of one run, in program order.

    `begin` and `finish`, which are called most, are to be shielded by their caller.
    """

    def __init__(self, guard: Host) -> None:
        self.recorder = guard.recorder
        self.storages = Storages()
        self._position = guard.position
        collectives = guard.collectives
        self._under_way = UnderWay(ignore) if collectives is None else collectives.under_way
        self._selected = guard.config.selected_module
        self._selects_all = not (guard.config.modules or self.recorder.phases_left_out)
        self._inputs_wanted = self.recorder.wants("input")
        self._sites = Sites()
        self._locator = Locator(guard)
        self._step = NONE
        self.on_step: Callable[[], None] = ignore  # what else is to be done when a step begins

    def forget(self) -> None:
        """To be called when no operators are watched any more."""
        self._locator.forget()

    def begin(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Running | None:
        """Record the inputs. None: there is nothing to be said of the operator's results."""
        if not isinstance(func, torch._ops.OpOverload):
            return None  # a higher-order operator: what it runs comes by itself
        if self._position.step != self._step:
            self._follow_step()
        operator = describe(func)
        every = self._inputs_wanted or self._under_way.outputs or self.storages.have_padding
        if operator.is_view or not operator.is_observed or (operator.is_silent and not every):
            self._locator.place_quickly()
            return None
        if every or operator.looked_at is None or (operator.moves and self.storages.hold_names):
            arguments = tensors_given(args, kwargs)
        else:
            arguments = tensors_at(operator.looked_at, args, kwargs)
        if operator.is_collective:
            for argument in arguments:
                self.storages.lose_sight(argument.tensor)
            return None
        return self._begin_recorded(operator, arguments, args, kwargs)

    @shielded
    def begin_opaque(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], writes: bool = False
    ) -> Running | None:
        """Record the inputs of code that may bypass the dispatcher. writes: all may be written."""
        if out_of_sight(self.recorder):
            return None
        if self._position.step != self._step:
            self._follow_step()
        arguments = [
            argument
            for argument in tensors_given(args, kwargs)
            if not is_traceable_wrapper_subclass(argument.tensor)
        ]
        operator = opaque_operator(name, frozenset(a.key for a in arguments) if writes else None)
        return self._begin_recorded(operator, arguments, args, kwargs)

    @shielded
    def finish_opaque(self, running: Running | None, result: Any, node: Any = None) -> None:
        """Record what that code returned; nothing of what it touched is trusted any more.

        node: of the graph, if it was its backward.
        """
        if running is None:
            return
        returned = tensors_returned(result)
        for argument in returned:
            argument.storage = self.storages.find(argument.tensor)
            self._locator.note_node(argument.tensor.grad_fn, running.place)
        for argument in (*running.arguments, *returned):
            if argument.storage is not None:
                argument.storage.forget()
        for argument in running.arguments:
            if argument.key in running.operator.written:
                self._written(running, argument, "after")
        stand_ins = () if node is None else blanks.stand_ins(self.storages, node, returned)
        for argument in returned:
            if any(argument is one for one in stand_ins):
                continue
            if argument.storage is not None:
                argument.storage.forget_blank()
            if not is_traceable_wrapper_subclass(argument.tensor):
                self._written(running, argument, None)

    def _begin_recorded(
        self,
        operator: Operator,
        arguments: list[Argument],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Running | None:
        place, phase = self._locator.place_of(args, kwargs)
        if self._under_way.outputs:
            look_for_use(self._under_way, operator, arguments, phase)
        selected = self._selects_all or self._is_selected(place.boundary, phase)
        if not selected and not operator.has_effects:
            return None
        find = self.storages.find
        for argument in arguments:
            argument.storage = find(argument.tensor)
        if not selected:
            return Running(operator, arguments, place, phase)
        running, site = self._running(operator, place, phase, arguments)
        if operator.is_random:
            self._record_generator(running, site, kwargs)
        if self._inputs_wanted and not operator.makes_uninitialised:
            for argument in arguments:
                if blanks.is_replaced(operator, argument):
                    continue
                moment = "before" if argument.key in operator.written else None
                if argument.storage is None or argument.storage.has_value(argument.tensor):
                    self._record(running, argument, "input", moment)
                else:
                    self._record_values(running, argument, "input", moment)
        return running

    def finish(self, running: Running, result: Any) -> None:
        """Record what the operator wrote, then what it returned."""
        operator, arguments = running.operator, running.arguments
        if operator.makes_uninitialised:
            blanks.made(self.storages, arguments, result)
            return
        blank = None
        if operator.copies or (self.storages.have_padding and operator.by_element):
            blank = blanks.left_by(self.storages, operator, arguments, result)
            if blank is not None and blank.is_vague:
                return
        if operator.moves and self.storages.hold_names:
            contents.follow(self.storages, operator.name, arguments, result)
        if operator.written:
            for argument in arguments:
                if argument.key in operator.written:
                    if operator.overwrites and not operator.moves:
                        contents.overwritten(argument)
                    self._written(running, argument, "after", blank)
            if operator.returns_written:
                return
        elif operator.is_foreign:
            for argument in arguments:
                if argument.storage is not None:
                    argument.storage.forget()
        known = [one.storage for one in arguments if one.storage is not None] if arguments else ()
        for returned in tensors_returned(result):
            if operator.written and any(a.tensor is returned.tensor for a in arguments):
                continue  # its version counter has not moved yet: it must not be looked up now
            returned.storage = self.storages.find(returned.tensor)
            if returned.element in operator.scratch:
                if returned.storage is not None:
                    returned.storage.make_blank()
                continue
            if returned.storage not in known or operator.writes_its_result:
                self._written(running, returned, None, blank)
                if operator.writes_its_result:
                    break

    def _written(
        self, running: Running, argument: Argument, moment: str | None, blank: Blank | None = None
    ) -> None:
        """Record what the operator left in a tensor, and that it wrote it."""
        storage, tensor = argument.storage, argument.tensor
        if moment is not None and torch.is_grad_enabled():
            self._locator.note_write(tensor, running.arguments, running.place)
        if storage is None:
            if moment is not None:
                # Which memory is behind a tensor of this kind is not known: it may be any.
                self.storages.forget_hashes()
            self._record(running, argument, "output", moment)
            return
        storage.writing(tensor, running.phase, moment is not None)
        if storage.pads:
            self.storages.have_padding = True
        elements = () if blank is None else blank.of(argument)
        if not elements:
            writer = self._record(running, argument, "output", moment)
        else:
            padding.make_blank(self.storages, storage, tensor, elements)
            writer = self._record_values(running, argument, "output", moment)
        storage.note_writer(extent_of(tensor), writer)

    def _running(
        self, operator: Operator, place: Place, phase: str, arguments: list[Argument]
    ) -> tuple[Running, Site]:
        boundary, source, sites = place.boundary, place.source, self._sites
        elements: tuple[Site, ...] = ()
        if operator.is_foreach:
            owners = self._locator.element_owners(arguments, phase)
            elements = tuple(sites.of(owner, operator.name, phase, source) for owner in owners)
        site = sites.of(boundary, operator.name, phase, source)
        call = sites.next_call(site, place.microbatch, self._position.module_call)
        return Running(operator, arguments, place, phase, site, call, elements), site

    def _is_selected(self, boundary: str, phase: str) -> bool:
        if phase in self.recorder.phases_left_out:
            return False
        # A parameter's operators are selected with the parameter, or with its module.
        return self._selected(boundary) or self._selected(boundary.rpartition(".")[0])

    def _record(self, running: Running, argument: Argument, role: str, moment: str | None) -> int:
        site = running.site
        if site is None:
            return NONE
        if running.element_sites and argument.element != NONE:
            site = running.element_sites[argument.element]
        key = site.key(self.recorder, argument, role, moment)
        return self.recorder.record_as(
            key, argument.tensor, None, running.place.microbatch, running.call,
            storage=argument.storage,
        )  # fmt: skip

    def _record_values(
        self, running: Running, argument: Argument, role: str, moment: str | None
    ) -> int:
        """As `_record`, of a tensor with blank elements: the others, if it is known which."""
        storage, tensor, site = argument.storage, argument.tensor, running.site
        blank = None if storage is None else padding.blank_elements(storage, tensor)
        if site is None or blank is None or padding.is_all(blank, tensor):
            return NONE
        if not blank:
            return self._record(running, argument, role, moment)
        if running.element_sites and argument.element != NONE:
            site = running.element_sites[argument.element]
        placement = padding.without(blank, tuple(tensor.shape))
        key = self.recorder.key_of(
            site.boundary, tensor, role=role, slot=argument.slot, phase=site.phase,
            operator=site.operator, placement=placement, source=site.source, moment=moment,
        )  # fmt: skip
        return self.recorder.record_as(
            key, tensor, placement, running.place.microbatch, running.call, storage=storage
        )

    def _record_generator(self, running: Running, site: Site, kwargs: dict[str, Any]) -> None:
        """The state that the operator will draw from is one of its inputs."""
        generator = kwargs.get("generator")
        if generator is None:
            device = next((argument.tensor.device for argument in running.arguments), None)
            generator = default_generator(kwargs.get("device") or device)
        if generator is not None:
            self.recorder.record_bytes(
                site.boundary, generator_state(generator), role="rng", slot=_RNG_SLOT,
                phase=running.phase, call=running.call, operator=site.operator,
                microbatch=running.place.microbatch,
            )  # fmt: skip

    def _follow_step(self) -> None:
        if self._position.step != self._step + 1:
            self.storages.forget_all()  # nobody followed what was written meanwhile
        self._step = self._position.step
        self._sites.begin_step()
        self._locator.forget()
        self.on_step()
