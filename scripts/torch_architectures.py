"""Compile PyTorch's architectures from both of its files: ``torch_architectures.py [NAME…] [--update PAGE]``.

With ``--outcomes FILE`` every outcome is stored there at once, and an architecture that stands there is not
made again: the list takes hours, and may be made in parts.

Each is exported as ONNX and as .pt2, compiled for GPU and PIM, verified by the compiler, and run on inputs
that it never saw; the outputs are compared with those of PyTorch. Weights are drawn. It takes the packages
torch, torchvision, timm and onnxscript. The exit code is 1 if values are wrong or a compilation breaks.
"""

import argparse
import contextlib
import io
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from configurations import git
from update_readme import fill

# Inputs have the size that their makers use; networks of many parameters are left out.
TORCHVISION = """
    alexnet convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet inception_v3
    mnasnet0_5 mobilenet_v2 mobilenet_v3_small regnet_x_400mf regnet_y_400mf resnet18 resnet50
    resnext50_32x4d shufflenet_v2_x1_0 squeezenet1_1 swin_t swin_v2_t vgg11_bn vit_b_32
"""
SEGMENTATION = ["deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"]
VIDEO = ["r3d_18"]
TIMM = """
    cait_xxs24_224 coat_lite_tiny crossvit_tiny_240 deit_tiny_patch16_224 dla34 edgenext_xx_small
    efficientformer_l1 fastvit_t8 fbnetc_100 ghostnet_100 hrnet_w18_small lcnet_050 levit_128s
    mixer_s32_224 mobilevit_xxs nfnet_f0 pit_ti_224 poolformer_s12 pvt_v2_b0 repvgg_a0 res2net50_26w_4s
    resmlp_12_224 rexnet_100 tinynet_e xcit_nano_12_p16_224
"""
DOORS = ("onnx", "pt2")
SECONDS = 900.0  # of one compilation
# Of the largest output: PIM and the stand-in for the GPU compute in fp16, layer after layer.
TOLERANCE = 2e-2
RIGHT, REFUSED, WRONG, BROKEN = "right", "refused", "wrong", "broken"


def modules() -> dict[str, Callable]:
    """Layers of torch.nn as small networks, by name: a function returns the module and its input's shape."""
    from torch import nn

    class First(nn.Module):
        """The first output of a module that has several."""

        def __init__(self, module, *, repeats: int = 1) -> None:
            super().__init__()
            self.module, self.repeats = module, repeats

        def forward(self, x):
            return self.module(*[x] * self.repeats)[0]

    def convolutions(dimensions: int, **options) -> nn.Module:
        """Two layers with an activation between them."""
        layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
        return nn.Sequential(
            layer(16, 64, 3, padding=1, **options), nn.ReLU(), layer(64, 64, 3, padding=1, **options)
        )

    return {
        "nn.Conv1d": lambda: (convolutions(1), (1, 16, 256)),
        "nn.Conv2d, circular": lambda: (convolutions(2, padding_mode="circular"), (1, 16, 32, 32)),
        "nn.Conv2d, reflect": lambda: (convolutions(2, padding_mode="reflect"), (1, 16, 32, 32)),
        "nn.Conv3d": lambda: (convolutions(3), (1, 16, 8, 16, 16)),
        "nn.ConvTranspose2d": lambda: (nn.ConvTranspose2d(32, 16, 4, 2, 1), (1, 32, 16, 16)),
        "nn.GRU": lambda: (First(nn.GRU(32, 64, batch_first=True)), (1, 12, 32)),
        "nn.GRU, two ways": lambda: (First(nn.GRU(32, 64, 2, bidirectional=True)), (12, 1, 32)),
        "nn.GroupNorm": lambda: (nn.Sequential(nn.Conv2d(16, 64, 1), nn.GroupNorm(8, 64)), (1, 16, 32, 32)),
        "nn.InstanceNorm2d": lambda: (
            nn.Sequential(nn.Conv2d(16, 64, 1), nn.InstanceNorm2d(64, affine=True)),
            (1, 16, 32, 32),
        ),
        "nn.LSTM": lambda: (First(nn.LSTM(32, 64)), (12, 1, 32)),
        "nn.MultiheadAttention": lambda: (
            First(nn.MultiheadAttention(64, 4, batch_first=True), repeats=3),
            (1, 64, 64),
        ),
        "nn.PixelShuffle": lambda: (
            nn.Sequential(nn.Conv2d(16, 64, 3, padding=1), nn.PixelShuffle(2)),
            (1, 16, 32, 32),
        ),
        "nn.RNN": lambda: (First(nn.RNN(32, 64)), (12, 1, 32)),
        "nn.TransformerEncoderLayer": lambda: (
            nn.TransformerEncoderLayer(64, 4, 128, batch_first=True),
            (1, 64, 64),
        ),
        "nn.Upsample": lambda: (
            nn.Sequential(nn.Conv2d(16, 32, 1), nn.Upsample(scale_factor=2, mode="bilinear")),
            (1, 16, 24, 24),
        ),
    }


def names() -> list[str]:
    """All architectures, in the order of the table."""
    return [*TORCHVISION.split(), *SEGMENTATION, *VIDEO, *TIMM.split(), *modules()]


def create(name: str) -> tuple:
    """An architecture of drawn weights and biases for inference, and inputs; norms have statistics."""
    import torch

    torch.manual_seed(0)
    if name in modules():
        module, shape = modules()[name]()
    elif name in TIMM.split():
        import timm

        module = timm.create_model(name, pretrained=False)
        shape = (1, *module.pretrained_cfg.get("input_size", (3, 224, 224)))
    else:
        from torchvision import models

        size = 299 if name == "inception_v3" else 224
        shape = (1, 3, 8, 56, 56) if name in VIDEO else (1, 3, size, size)
        # Inception's own initialisation leaves fp16 behind 40 layers, which is refused with advice.
        own = {"googlenet": {"init_weights": True}, "inception_v3": {"init_weights": False}}
        keywords = own.get(name, {})
        keywords |= {"weights_backbone": None} if name in SEGMENTATION else {}
        module = models.get_model(name, weights=None, **keywords)
    module.eval()
    for buffer_name, buffer in module.named_buffers():
        if buffer_name.endswith("running_var"):
            buffer.uniform_(0.5, 1.5)
    with torch.no_grad():
        for parameter in module.parameters():
            if not parameter.any():  # the exporter to ONNX drops biases of zeros
                parameter.uniform_(-0.1, 0.1)
    return module, torch.randn(shape), torch.randn(shape)


def tensors(value: object) -> list:
    """The tensors of what a module returns, in order."""
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value
    return [tensor for entry in values for tensor in tensors(entry)]


def export(name: str, folder: Path) -> None:
    """Write both files of an architecture to `folder`, and an input with its outputs."""
    import torch

    module, example, inputs = create(name)
    with torch.no_grad():
        outputs = tensors(module(inputs))
    np.savez(folder / "values.npz", inputs, *[tensor.numpy() for tensor in outputs])
    torch.export.save(torch.export.export(module, (example,)), folder / "network.pt2")
    torch.onnx.export(module, (example,), folder / "network.onnx", dynamo=True, verbose=False)


@dataclass(frozen=True)
class DoorOutcome:
    """What becomes of one file: the error relative to the largest output, modelled times, the commit."""

    kind: str
    reason: str = ""
    error: float = 0.0
    gpu_only_ns: float = 0.0
    latency_ns: float = 0.0
    commit: str = ""


def compile_file(path: Path) -> DoorOutcome:
    """Compile a file in this process, and compare its outputs with PyTorch's."""
    import pimflow
    from pimflow.errors import PimflowError, VerificationError

    with np.load(path.with_name("values.npz")) as stored:
        inputs, *expected = stored.values()
    directory = path.with_suffix("")
    try:
        compiled = pimflow.compile(str(path), directory, modes=("GPU", "PIM"), conventions="none")
        results = pimflow.run(directory, inputs)
    except VerificationError as error:
        return DoorOutcome(WRONG, str(error))
    except PimflowError as error:
        return DoorOutcome(REFUSED, str(error))
    report = compiled.report.to_json()
    times = {"gpu_only_ns": report["latency_gpu_only_ns"], "latency_ns": report["latency_ns"]}
    if [result.shape for result in results] != [output.shape for output in expected]:
        return DoorOutcome(WRONG, "outputs of other shapes", **times)
    errors = [
        np.abs(result - output).max() / np.abs(output).max() for result, output in zip(results, expected)
    ]
    kind = RIGHT if max(errors) <= TOLERANCE else WRONG
    return DoorOutcome(kind, f"off by {max(errors):.1e} of the largest value", float(max(errors)), **times)


def outcome(name: str, folder: Path, door: str) -> DoorOutcome:
    """Export or compile in a process of its own, which may end as it likes."""
    command = [sys.executable, __file__, "--in", str(folder), "--door", door, name]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return DoorOutcome(BROKEN, f"took more than {SECONDS:g} s")
    if finished.returncode:
        last_line = next(reversed(finished.stderr.strip().splitlines()), "")
        return DoorOutcome(BROKEN, last_line or f"the process ended with {finished.returncode}")
    return DoorOutcome(**json.loads(finished.stdout.splitlines()[-1]))


def run_alone(name: str, folder: Path, door: str) -> None:
    """Do one step of an architecture, and print its outcome as JSON in the last line."""
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(io.StringIO()):
        if door == "export":
            export(name, folder)
            result = DoorOutcome(RIGHT)
        else:
            result = compile_file(folder / f"network.{door}")
    print(json.dumps(vars(result)))


def row(name: str, outcomes: dict[str, DoorOutcome]) -> str:
    """A line of the table."""
    cells = [name]
    for door in DOORS:
        result = outcomes[door]
        if result.kind == RIGHT:
            cells += [
                f"{result.error:.0e}",
                f"{result.gpu_only_ns / 1e6:.4f} → {result.latency_ns / 1e6:.4f}",
            ]
        else:
            cells += [result.kind, ""]
    times = [outcomes[door].gpu_only_ns for door in DOORS]
    cells.append(f"{max(times) / min(times):.2f}" if min(times) else "")
    cells.append(outcomes[DOORS[0]].commit)
    return f"| {' | '.join(cells)} |"


def time_difference(outcomes: dict[str, DoorOutcome]) -> float:
    """By how much of the smaller a time of both files differs; 0 if one of them has none."""
    doors = [outcomes[door] for door in DOORS]
    pairs = [[door.gpu_only_ns for door in doors], [door.latency_ns for door in doors]]
    return max(max(pair) / min(pair) for pair in pairs) - 1 if all(map(all, pairs)) else 0.0


def table(results: dict[str, dict[str, DoorOutcome]]) -> str:
    """A Markdown table of all outcomes, with a count of each kind and the reasons of what is not right."""
    heads = ("architecture", "ONNX: error", "ms, GPU → plan", ".pt2: error", "ms, GPU → plan")
    heads = (*heads, "GPU, ratio", "commit")
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    lines += [*(row(name, outcomes) for name, outcomes in results.items()), ""]
    for door in DOORS:
        kinds = [outcomes[door].kind for outcomes in results.values()]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in (RIGHT, REFUSED, WRONG, BROKEN))
        lines.append(f"{door}: {counts}")
        lines.append("")
    different = max((time_difference(outcomes) for outcomes in results.values()), default=0.0)
    lines += [
        f"{len(results)} architectures; a time differs by {different:.2%} at most between both files.",
        "",
    ]
    for name, outcomes in results.items():
        for door in DOORS:
            if outcomes[door].kind != RIGHT:
                lines.append(f"- {name}, {door}, {outcomes[door].kind}: {outcomes[door].reason}")
    return "\n".join(lines).rstrip()


def attempt(name: str) -> dict[str, DoorOutcome]:
    """The outcome of an architecture by door."""
    with tempfile.TemporaryDirectory() as scratch:
        commit = git("rev-parse", "--short=8", "HEAD")
        exported = outcome(name, Path(scratch), "export")
        if exported.kind != RIGHT:
            return dict.fromkeys(DOORS, DoorOutcome(BROKEN, f"export: {exported.reason}", commit=commit))
        outcomes = {door: outcome(name, Path(scratch), door) for door in DOORS}
        return {door: replace(result, commit=commit) for door, result in outcomes.items()}


def stored_outcomes(path: Path | None) -> dict[str, dict[str, DoorOutcome]]:
    """The outcomes in a file of one JSON object a line, by architecture; of several lines the last counts."""
    if path is None or not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {line["name"]: {door: DoorOutcome(**line[door]) for door in DOORS} for line in lines}


def store(path: Path, name: str, outcomes: dict[str, DoorOutcome]) -> None:
    """Append the outcomes of an architecture to a file that `stored_outcomes` reads."""
    with path.open("a", encoding="utf-8") as file:
        print(json.dumps({"name": name, **{door: vars(outcomes[door]) for door in DOORS}}), file=file)


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all; --list prints them")
    parser.add_argument("--list", action="store_true", help="print the names")
    parser.add_argument("--update", type=Path, metavar="PAGE", help="write the table there too")
    parser.add_argument("--outcomes", type=Path, metavar="FILE", help="keep outcomes there, go on from it")
    parser.add_argument("--in", dest="folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--door", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.folder:
        run_alone(args.names[0], args.folder, args.door)
        return 0
    if args.list:
        print(*names(), sep="\n")
        return 0
    if unknown := set(args.names) - set(names()):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; see --list")
    results, stored = {}, stored_outcomes(args.outcomes)
    for name in args.names or names():
        results[name] = stored.get(name) or attempt(name)
        if args.outcomes and name not in stored:
            store(args.outcomes, name, results[name])
        reasons = [f"{door}: {result.kind}: {result.reason}" for door, result in results[name].items()]
        print(name, *reasons, sep="\n    ", file=sys.stderr, flush=True)
    text = table(results)
    print(text)
    if args.update:
        page = args.update.read_text(encoding="utf-8")
        args.update.write_text(fill(page, "torch", text), encoding="utf-8")
    kinds = {result.kind for outcomes in results.values() for result in outcomes.values()}
    return int(not kinds.isdisjoint({WRONG, BROKEN}))


if __name__ == "__main__":
    sys.exit(main())
