"""What the expressions of a GPU kernel compute for all threads at once, and how they access memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tvm_ffi
from tvm import ir, tirx

from pimflow.compiler.kernel_checks.access_log import Bools
from pimflow.compiler.kernel_checks.lane_memory import Expression, LaneMemory, Place
from pimflow.compiler.kernel_checks.launch import Purpose, choice_parts, is_choice, nodes, operands
from pimflow.compiler.kernel_checks.memo import Memo
from pimflow.compiler.kernel_checks.operators import BINARY, FUNCTIONS, SHUFFLES, Array
from pimflow.compiler.kernel_checks.threads import WARP, View, type_of
from pimflow.errors import UnsupportedOpError


class LaneValues(LaneMemory):
    """Values of expressions: each becomes a function that returns an array of rows and columns."""

    _restrictions: Memo[tuple[Bools | None, bool]]
    _inverses: Memo[Array]
    # Of a launch: where loads read, by hash, and what they gave last, by the place.
    _places: dict[int, list[tuple[ir.Expr, Callable[[], Place]]]]
    _last_loads: dict[int, list[tuple[Place, int, Array]]]

    def _is_written(self, view: View) -> bool:
        """Whether a buffer lies in global memory that the launch writes."""
        memory = self._memories.get(view.memory)
        return memory is not None and memory.scope == "global" and memory.log is not None

    def _is_watched(self, buffer: ir.Var) -> bool:
        """Whether accesses to a buffer are made although values are not computed."""
        return self.purpose is Purpose.BOUNDS or self._is_written(self._views[buffer])

    def _expression_reads(self, expr: ir.Expr) -> Callable[[], None] | None:
        """What makes the watched reads of an expression, without its value; None if it has none."""
        loads = [load for load in nodes(expr, ir.TensorLoad) if self._is_watched(load.source)]
        if not loads:
            return None
        if not any(map(is_choice, nodes(expr, ir.Call, tirx.Select))):
            places = {id(place): place for place in map(self._place_of_load, loads)}.values()

            def _read() -> None:
                for place in places:
                    self._record(place(), False)

            return _read
        if is_choice(expr):
            condition, *sides = choice_parts(expr)
            test = self._memoize([condition], self._expression(condition))
            chosen = self._choice_reads(test, *map(self._expression_reads, sides))
            reads = [read for read in (self._expression_reads(condition), chosen) if read]
        else:
            reads = [read for part in operands(expr) if (read := self._expression_reads(part))]
            if isinstance(expr, ir.TensorLoad) and self._is_watched(expr.source):
                place = self._place_of_load(expr)
                reads.append(lambda: self._record(place(), False))

        def _run() -> None:
            for read in reads:
                read()

        return _run

    def _choice_reads(
        self, test: Expression, first: Callable[[], None] | None, second: Callable[[], None] | None
    ) -> Callable[[], None]:
        """The reads of the sides of a choice, each by the threads that take it."""

        def _run() -> None:
            holds, outer = test(), self._running.mask
            for read, takes in ((first, holds), (second, self._inverse(holds))):
                if read and self._restrict(takes, outer):
                    read()
                self._running.mask = outer

        return _run

    # ---- Expressions: each becomes a function that returns an array of rows and columns

    def _expression(self, expr: ir.Expr) -> Expression:
        if isinstance(expr, tirx.IntImm | tirx.FloatImm):
            constant = np.full((1, 1), expr.value, type_of(expr)[0])
            return lambda: constant
        if isinstance(expr, ir.Var):
            variable, values = self._variable(expr), self._values
            return lambda: values[variable]
        operator = BINARY.get(type(expr))
        if operator is not None:
            return self._operation(operator, expr)
        make = getattr(self, f"_{type(expr).__name__.lower()}", None)
        if make is None:
            raise UnsupportedOpError(f"no meaning for the expression {type(expr).__name__}")
        expression: Expression = make(expr)
        return expression

    def _operation(self, operator: Callable[[Array, Array], Array], expr: ir.Expr) -> Expression:
        a, b = self._expression(expr.a), self._expression(expr.b)
        return lambda: operator(a(), b())

    def _div(self, expr: tirx.Div) -> Expression:
        a, b = self._expression(expr.a), self._expression(expr.b)
        if type_of(expr)[0].kind == "f":
            return lambda: a() / b()

        def _quotient() -> Array:
            x, y = a(), b()
            result: Array = np.floor_divide(x - np.fmod(x, y), y)
            return result

        return _quotient

    def _and(self, expr: tirx.And) -> Expression:
        return self._short_circuit(expr, needs_right=True)

    def _or(self, expr: tirx.Or) -> Expression:
        return self._short_circuit(expr, needs_right=False)

    def _short_circuit(self, expr: ir.Expr, needs_right: bool) -> Expression:
        """``a && b`` or ``a || b``: `b` runs only where `a` is `needs_right`."""
        a, b = self._expression(expr.a), self._expression(expr.b)

        def _value() -> Array:
            left = a()
            right = self._under(left == needs_right, b)
            if right is None:
                return left
            return left & right if needs_right else left | right

        return _value

    def _under(self, condition: Array, expression: Expression) -> Array | None:
        """The value of an expression for the threads for which `condition` holds; None if for none."""
        outer = self._running.mask
        value = expression() if self._restrict(condition, outer) else None
        self._running.mask = outer
        return value

    def _restrict(self, condition: Array, outer: Bools | None) -> bool:
        """Let only threads run for which `condition` holds, of those of `outer`; whether there are any."""
        self._running.mask, runs = self._restrictions.result(
            (condition, outer), lambda: _restriction(condition, outer)
        )
        return runs

    def _inverse(self, condition: Array) -> Array:
        return self._inverses.result((condition,), lambda: ~condition)

    def _not(self, expr: tirx.Not | tirx.BitwiseNot) -> Expression:
        a = self._expression(expr.a)
        return lambda: ~a()

    _bitwisenot = _not

    def _cast(self, expr: tirx.Cast) -> Expression:
        value, dtype = self._expression(expr.value), type_of(expr)[0]
        return lambda: value().astype(dtype)

    def _ramp(self, expr: tirx.Ramp) -> Expression:
        base, stride = self._expression(expr.base), self._expression(expr.stride)
        steps = np.arange(int(expr.lanes), dtype=type_of(expr)[0])[None, :]
        return lambda: base() + stride() * steps

    def _broadcast(self, expr: tirx.Broadcast) -> Expression:
        return self._expression(expr.value)  # one column stands for all

    def _shuffle(self, expr: tirx.Shuffle) -> Expression:
        vectors = [(self._expression(vector), type_of(vector)[1]) for vector in expr.vectors]
        columns = [int(index) for index in expr.indices]

        def _value() -> Array:
            parts = [vector() for vector, _ in vectors]
            rows = max(map(len, parts))
            wide = [np.broadcast_to(part, (rows, lanes)) for part, (_, lanes) in zip(parts, vectors)]
            return np.concatenate(wide, axis=1)[:, columns]

        return _value

    def _let(self, expr: tirx.Let) -> Expression:
        bound, body = self._expression(expr.value), self._expression(expr.body)
        variable = self._variable(expr.var)

        def _value() -> Array:
            self._values[variable] = bound()
            return body()

        return _value

    def _select(self, expr: tirx.Select) -> Expression:
        """A choice; CUDA evaluates both sides of a vector, and one of a scalar."""
        if type_of(expr)[1] == 1:
            return self._choice(expr.condition, expr.true_value, expr.false_value)
        condition, a, b = map(self._expression, (expr.condition, expr.true_value, expr.false_value))
        return lambda: np.where(condition(), a(), b())

    def _choice(self, condition: ir.Expr, true_value: ir.Expr, false_value: ir.Expr) -> Expression:
        """A choice of which each thread evaluates one side."""
        a, b = map(self._expression, (true_value, false_value))
        test = self._memoize([condition], self._expression(condition))

        def _value() -> Array:
            holds = test()
            chosen, other = self._under(holds, a), self._under(self._inverse(holds), b)
            if chosen is None or other is None:
                result = other if chosen is None else chosen
                assert result is not None, "a branch runs only where a thread takes it"
                return result
            return np.where(holds, chosen, other)

        return _value

    def _place_of_load(self, load: ir.Expr) -> Callable[[], Place]:
        """Where a load reads; equal ones share what they compute."""
        known = self._places.setdefault(tvm_ffi.structural_hash(load), [])
        for equal, place in known:
            if tvm_ffi.structural_equal(load, equal):
                return place
        known.append((load, self._place(self._views[load.source], load.indices)))
        return known[-1][1]

    def _tensorload(self, expr: ir.Expr) -> Expression:
        """What memory has; equal loads share it as long as nothing is written."""
        place = self._place_of_load(expr)
        last = self._last_loads.setdefault(id(place), [])

        def _value() -> Array:
            target = place()
            if last and last[0][0] is target and last[0][1] == target.memory.version:
                self._record(target, False)
            else:
                last[:] = [(target, target.memory.version, self._load(target))]
            return last[0][2]

        return _value

    def _call(self, expr: ir.Call) -> Expression:
        name, arguments = expr.op.name.rpartition(".")[2], list(expr.args)
        if name == "if_then_else":
            return self._choice(*arguments)
        if name in ("call_pure_extern", "call_extern"):
            name, arguments = arguments[0].value, arguments[1:]
        if name == "__activemask":
            return self._active_mask
        if name in SHUFFLES:
            return self._warp_shuffle(SHUFFLES[name], *map(self._expression, arguments[1:4]))
        if name == "likely":
            return self._expression(arguments[0])
        if name == "reinterpret":
            bits, dtype = self._expression(arguments[0]), type_of(expr)[0]
            return lambda: bits().view(dtype)
        known = (name, name.removesuffix("f"), name.removeprefix("h"))
        function = next((FUNCTIONS[word] for word in known if word in FUNCTIONS), None)
        if function is None:
            raise UnsupportedOpError(f"no meaning for the function {name}")
        values = list(map(self._expression, arguments))
        return lambda: function(*(value() for value in values))

    def _warp_shuffle(
        self,
        source_of: Callable[[Array, Array, int], Array],
        value: Expression,
        argument: Expression,
        width: Expression,
    ) -> Expression:
        """The value of another thread of the warp; NaN of one that does not run.

        `source_of` is one of `SHUFFLES`.
        """

        def _value() -> Array:
            lanes, extent = self._running, int(width()[0, 0])
            values = np.broadcast_to(value(), (lanes.count, 1))
            thread = (np.arange(lanes.count) % lanes.launch.threads)[:, None]
            lane = thread % extent
            other = source_of(lane, argument(), extent)
            other = np.where((other >= 0) & (other < extent), other, lane)
            other_thread = thread - lane + other
            exists = other_thread < lanes.launch.threads
            source = (np.arange(lanes.count)[:, None] + np.where(exists, other - lane, 0))[:, 0]
            result: Array = values[source]
            idle = ~exists if lanes.mask is None else ~exists | ~lanes.mask[source]
            return np.where(idle, np.full(1, np.nan).astype(result.dtype), result) if idle.any() else result

        return _value

    def _active_mask(self) -> Array:
        """``__activemask``: a bit for each thread of the warp that runs."""
        lanes = self._running
        running = np.ones(lanes.count, bool) if lanes.mask is None else lanes.mask[:, 0]
        lane = np.arange(lanes.count) % lanes.launch.threads % WARP
        masks = np.bincount(lanes.warp_index, weights=np.where(running, 2.0**lane, 0))
        return masks.astype(np.uint32)[lanes.warp_index, None]


def _restriction(condition: Array, outer: Bools | None) -> tuple[Bools | None, bool]:
    """The threads of `outer` for which a condition holds, None for all, and whether there are any."""
    if len(condition) == 1:
        return outer, bool(condition[0, 0])
    if condition.all():
        return outer, True
    mask = condition if outer is None else condition & outer
    return mask, bool(mask.any())
