"""Profile, solve, compile, run, report: ``search_and_compile.py MODEL [-o DIR]``."""

import argparse

import pimflow
from pimflow.commands.shared import report_text


def main() -> None:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="name of the zoo, or ONNX file")
    parser.add_argument("-o", "--output", help="directory to write")
    args = parser.parse_args()

    system = pimflow.system()
    search_result = pimflow.search(args.model, system)  # profile and solve
    print(f"plan for {search_result.graph.name}: {search_result.plan.latency_ns / 1e6:.4f} ms predicted")
    compiled = pimflow.compile(args.model, args.output, target_system=system, plan=search_result.plan)
    print(report_text.table(compiled.report, args.output))
    if args.output:
        for output in pimflow.run(args.output):
            print(f"output {output.shape}: {output.min():.4g} .. {output.max():.4g}")


if __name__ == "__main__":
    main()
