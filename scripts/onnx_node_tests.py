"""Run the operator tests of the ONNX standard: ``onnx_node_tests.py [--sample N] [--seed S] [--match TEXT]``.

They come with the package `onnx`: a model, its inputs, and the outputs that the standard asks for. Each model
is built by `tvm.relay.build` for ``llvm+pim``. What is refused is tried once more with all inputs but the
first as constants, as real networks have shapes, axes and scales. The exit code is 1 if a test is wrong or
broken.
"""

import argparse
import collections
import dataclasses
import json
import multiprocessing
import queue
import random
import re
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import numpy_helper
from onnx.backend.test.case.test_case import TestCase
from update_readme import fill

from pimflow.errors import PimflowError

RIGHT, CONSTANTS, REFUSED, WRONG, BROKEN = "right", "right, constants", "refused", "wrong", "broken"
STORED = ("pytorch-converted", "pytorch-operator", "simple")
OTHERS = "no tensors"  # sequences, optional values and texts
SECONDS = 120.0  # of a test; the first of a process also loads TVM
FP16_TOLERANCE = 4e-3  # of the largest value: borders of devices are stored in fp16


def node_tests() -> dict[str, TestCase]:
    """All operator tests by name."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tests = [test for test in collect_testcases(None) if test.model is not None and test.data_sets]
    return {test.name: test for test in tests}


def stored_tests() -> dict[str, TestCase]:
    """The tests that the package stores as files, by name: parts of PyTorch, and small networks."""
    from onnx.backend.test.loader import load_model_tests

    tests = {}
    for kind in STORED:
        for test in load_model_tests(kind=kind):
            folder = Path(test.model_dir)
            model = onnx.load(folder / "model.onnx")
            data_sets = [
                tuple(
                    [_stored_value(path) for path in sorted(data.glob(f"{side}_*.pb"), key=_number)]
                    for side in ("input", "output")
                )
                for data in sorted(folder.glob("test_data_set_*"))
            ]
            tests[test.name] = dataclasses.replace(test, model=model, data_sets=data_sets)
    return tests


def _number(path: Path) -> int:
    return int(path.stem.rpartition("_")[2])


def _stored_value(path: Path) -> np.ndarray | None:
    """The tensor in a file; None if it holds a sequence, or nothing."""
    tensor = onnx.TensorProto()
    try:
        tensor.ParseFromString(path.read_bytes())
        return numpy_helper.to_array(tensor)
    except (DecodeError, TypeError, ValueError, KeyError):
        return None


def sample(names: Sequence[str], count: int, seed: int | str) -> list[str]:
    """`count` names that are drawn by `seed`; all if there are fewer."""
    return random.Random(seed).sample(sorted(names), min(count, len(names)))


def outcome(test: TestCase) -> tuple[str, str]:
    """What becomes of a test, and why."""
    values = [value for data in test.data_sets for value in (*data[0], *data[1])]
    if any(not isinstance(v, np.ndarray | np.generic) or np.asarray(v).dtype.kind in "OUS" for v in values):
        return OTHERS, ""
    kind, reason = _attempt(test.model, test.data_sets, test.rtol, test.atol)
    if kind == REFUSED and len(test.data_sets) == 1 and len(_input_names(test.model)) > 1:
        again, again_reason = _attempt(*constants_model(test.model, test.data_sets[0]), test.rtol, test.atol)
        return (CONSTANTS, reason) if again == RIGHT else (again, again_reason)
    return kind, reason


def _results(model: onnx.ModelProto, samples: Sequence[Sequence]) -> list[list[np.ndarray]]:
    """The outputs of a model for several inputs; raises what building and running it does."""
    import tvm
    from tvm import relay
    from tvm.contrib import graph_executor

    names = _input_names(model)
    shapes = {name: np.shape(value) for name, value in zip(names, samples[0])}
    module, params = relay.frontend.from_onnx(model, shapes)
    with tvm.transform.PassContext(config={"pimflow.verify": False}):  # the standard's values judge
        library = relay.build(module, target="llvm+pim", params=params)
    executor = graph_executor.GraphModule(library["default"](tvm.cpu()))
    results = []
    for inputs in samples:
        for name, value in zip(names, inputs):
            executor.set_input(name, np.asarray(value))
        executor.run()
        results.append([executor.get_output(i).numpy() for i in range(len(model.graph.output))])
    return results


def _input_names(model: onnx.ModelProto) -> list[str]:
    stored = {tensor.name for tensor in model.graph.initializer}
    return [value.name for value in model.graph.input if value.name not in stored]


def _attempt(model: onnx.ModelProto, data_sets: Sequence, rtol: float, atol: float) -> tuple[str, str]:
    """Build and run a model, and compare with the outputs of the standard."""
    try:
        results = _results(model, [inputs for inputs, _ in data_sets])
        for values, (_, outputs) in zip(results, data_sets):
            for index, (value, expected) in enumerate(zip(values, map(np.asarray, outputs))):
                if difference := _difference(value, expected, rtol, atol):
                    return WRONG, f"output {index}: {difference}"
    except PimflowError as error:
        return REFUSED, str(error)
    except Exception as error:  # whatever comes out is the result
        return BROKEN, f"{type(error).__name__}: {next(reversed(str(error).splitlines()), '')}"
    return RIGHT, ""


def _difference(result: np.ndarray, expected: np.ndarray, rtol: float, atol: float) -> str:
    """How a result differs from what is expected; empty if it is as good as equal."""
    if (result.shape, result.dtype) != (expected.shape, expected.dtype):
        return f"{result.dtype}{result.shape} for {expected.dtype}{expected.shape}"
    if expected.dtype.kind not in "fcV":
        is_equal = np.array_equal(result, expected)
    else:
        a, b = result.astype(np.float64), expected.astype(np.float64)
        largest = np.abs(b[np.isfinite(b)]).max(initial=0)
        bounds = {"rtol": max(rtol, FP16_TOLERANCE), "atol": max(atol, FP16_TOLERANCE * largest)}
        with np.errstate(all="ignore"):
            is_equal = np.allclose(a, b, **bounds, equal_nan=True)
    return "" if is_equal else f"{result.ravel()[:4]} for {expected.ravel()[:4]}"


def constants_model(model: onnx.ModelProto, data: tuple) -> tuple[onnx.ModelProto, list]:
    """The model with all inputs but the first as initializers, and its data without them."""
    names, (inputs, outputs) = _input_names(model), data
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for name, value in list(zip(names, inputs))[1:]:
        changed.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
        changed.graph.input.remove(next(entry for entry in changed.graph.input if entry.name == name))
    return changed, [(inputs[:1], outputs)]


def _serve(connection: Connection) -> None:
    """Answer names of tests by their outcomes, until there is no other name."""
    tests = node_tests() | stored_tests()
    for name in iter(connection.recv, None):
        connection.send(outcome(tests[name]))


def outcomes(names: Sequence[str], jobs: int = 1, seconds: float = SECONDS) -> Iterator[tuple[str, str, str]]:
    """Name, outcome and reason of each test, by so many processes at once."""
    results: queue.SimpleQueue[tuple[str, str, str]] = queue.SimpleQueue()

    def work(part: Sequence[str]) -> None:
        """Put the outcomes of tests into the queue."""
        for result in _outcomes_in_order(part, seconds):
            results.put(result)

    for job in range(jobs):
        threading.Thread(target=work, args=(names[job::jobs],), daemon=True).start()
    for _ in names:
        yield results.get()


def _outcomes_in_order(names: Sequence[str], seconds: float) -> Iterator[tuple[str, str, str]]:
    """The outcomes of a process; if that dies or takes too long, the test is broken, and another goes on."""
    context = multiprocessing.get_context("spawn")
    process = None
    for name in names:
        if process is None:
            connection, far_end = context.Pipe()
            process = context.Process(target=_serve, args=(far_end,), daemon=True)
            process.start()
            far_end.close()
        try:
            connection.send(name)
            if not connection.poll(seconds):
                raise EOFError
            yield (name, *connection.recv())
        except (EOFError, OSError):
            process.kill()
            process.join()
            process = None
            yield name, BROKEN, f"the process ended, or took more than {seconds:g} s"
    if process is not None:
        connection.send(None)
        process.join()


def table(counts: collections.Counter[str]) -> str:
    """A Markdown table of outcomes."""
    tensors = counts.total() - counts[OTHERS]
    lines = ["| outcome | tests | of those on tensors |", "|---|---|---|"]
    for kind in (RIGHT, CONSTANTS, REFUSED, WRONG, BROKEN):
        lines.append(f"| {kind} | {counts[kind]} | {100 * counts[kind] / max(1, tensors):.1f} % |")
    return "\n".join([*lines, f"| {OTHERS} | {counts[OTHERS]} | |"])


def refusal_table(refused: dict[str, str]) -> str:
    """A Markdown table of the sentences with which tests are refused; those that differ by names are one."""
    groups: dict[str, list[str]] = {}
    for name, reason in sorted(refused.items()):
        sentence = re.sub(r"^model '[^']*': ", "", reason)
        groups.setdefault(re.sub(r"'[^']*'|\b\d+\b", "…", sentence), []).append(f"{name}|{sentence}")
    lines = [
        "What is refused, and with which sentence; those that differ by names and numbers are one row:",
        "",
    ]
    lines += ["| tests | for example | refused with |", "|---|---|---|"]
    for members in sorted(groups.values(), key=lambda group: (-len(group), group)):
        name, _, sentence = members[0].partition("|")
        cell = sentence.replace("|", "\\|")
        lines.append(f"| {len(members)} | {name.removeprefix('test_')} | {cell} |")
    return "\n".join(lines)


def stored_outcomes(path: Path | None) -> dict[str, tuple[str, str]]:
    """By test, the outcome and reason in a file that an earlier run wrote; empty without one."""
    if path is None or not path.exists():
        return {}
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {name: (kind, reason) for name, kind, reason in rows}


def main() -> int:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sample", type=int, help="how many tests to draw; all by default")
    parser.add_argument("--seed", default="0", help="what draws them (default: %(default)s)")
    parser.add_argument("--match", default="", help="a text that names of tests have")
    parser.add_argument(
        "--stored",
        action="store_true",
        help="run the tests that are stored as files: PyTorch's, and small networks",
    )
    parser.add_argument("--refused", action="store_true", help="print what is refused, and why")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of a test (default: %(default)s)")
    parser.add_argument(
        "--outcomes", type=Path, metavar="FILE", help="add outcomes to this file, and run only those it lacks"
    )
    parser.add_argument("--update", type=Path, metavar="PAGE", help="write the table there too")
    args = parser.parse_args()
    names = [name for name in (stored_tests() if args.stored else node_tests()) if args.match in name]
    drawn = sample(names, args.sample or len(names), args.seed)
    stored = stored_outcomes(args.outcomes)
    found = {name: stored[name] for name in drawn if name in stored}
    for name, kind, reason in outcomes(
        [name for name in drawn if name not in found], args.jobs, args.seconds
    ):
        found[name] = kind, reason
        if args.outcomes:
            with args.outcomes.open("a", encoding="utf-8") as file:
                file.write(json.dumps([name, kind, reason]) + "\n")
    for name, (kind, reason) in found.items():
        if kind in (WRONG, BROKEN) or (args.refused and kind == REFUSED):
            print(f"{kind}: {name}: {reason}", flush=True)
    counts = collections.Counter(kind for kind, _ in found.values())
    text = table(counts)
    print(text)
    if args.update:
        page = fill(args.update.read_text(encoding="utf-8"), "onnx stored" if args.stored else "onnx", text)
        if not args.stored:
            refused = {name: reason for name, (kind, reason) in found.items() if kind == REFUSED}
            page = fill(page, "onnx refused", refusal_table(refused))
        args.update.write_text(page, encoding="utf-8")
    return int(bool(counts[WRONG] or counts[BROKEN]))


if __name__ == "__main__":
    sys.exit(main())
