"""Triton's interpreter without what it does over and over, which takes longer than the kernels of tests do.

It puts its own functions in the place of the language's for every launch and every call of a helper: here that is done
once and stays. It checks each whole number's addition and product for overflow: tests' shapes are far too small for
one. It writes the types of all tuples, and the names of all types, which nobody reads: here they are written when
somebody does.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace


def quicken() -> None:
    """Once in a process, before any kernel is launched there. What another version of Triton has otherwise stays."""
    import triton.language as tl
    from triton.runtime import interpreter

    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    done = interpreter._LangPatchScope()
    interpreter._patch_lang = lambda fn: done
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    _name_types_late(tl.core)
    _look_dtypes_up(interpreter)


def _name_types_late(core) -> None:
    def tuple_type(self, types, fields=None) -> None:
        self.types = types
        self.fields = fields or [""] * len(types)

    def block_type(self, element_ty, shape) -> None:
        self.element_ty = element_ty
        self.shape = core.tuple(core._unwrap_shape(shape))
        if not self.shape:
            raise TypeError("0d block_type is forbidden")
        self.numel = core.validate_block_shape(self.shape)

    def make_tuple(self, args, type=None) -> None:
        self.values = list(args)
        self._told = type

    def type_of(self):
        told = self._told
        if told is None:
            self._told = told = core._type_for_tuple_values(self.values)
        elif not isinstance(told, core.tuple_type):
            self._told = told = core.tuple_type(told)
        return told

    core.tuple_type.__init__ = tuple_type
    core.tuple_type.name = property(
        lambda t: "[" + ",".join(f"{k}:{v}" for k, v in zip(t.fields, t.types, strict=False)) + "]"
    )
    core.block_type.__init__ = block_type
    core.block_type.name = property(lambda t: f"<{t.shape}, {t.element_ty}>")
    core.tuple.__init__ = make_tuple
    core.tuple.type = property(type_of, lambda self, told: setattr(self, "_told", told))


def _look_dtypes_up(interpreter) -> None:
    """Of scalars, by their names: the interpreter writes its whole table for each look."""
    found = {}
    plain = interpreter._get_np_dtype

    def dtype(of):
        name = of.name if of.is_ptr() or not of.is_block() else of.element_ty.name
        if name not in found:
            found[name] = plain(of)
        return found[name]

    interpreter._get_np_dtype = dtype
