"""Does ``--calibration`` say how often networks agree, and refuse what does not fit?"""

import numpy as np
import onnx
import pytest
from command_line import error_line
from onnx import TensorProto, helper, numpy_helper
from skip_networks import hourglass

import pimflow
from pimflow import frontend
from pimflow.decomposition.calibration import Calibration, agreement
from pimflow.decomposition.network import decompose
from pimflow.decomposition.request import DecompositionRequest
from pimflow.errors import CalibrationError

SAMPLES = 30


def random_inputs(network: frontend.Network, samples: int = SAMPLES) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {
        name: draw.standard_normal((samples, *dims[1:])).astype(dtype)
        for name, (dims, dtype) in network.inputs.items()
    }


def outputs(network: frontend.Network, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """A sample at a time."""
    (name,), run = inputs, network.reference.prepared()
    return np.concatenate([run({name: x[None]})[0] for x in inputs[name]])


@pytest.fixture(scope="module")
def toy():
    return decompose(frontend.load("toy"), DecompositionRequest.parse("tucker:0.9"))


@pytest.mark.long
def test_classes_against_counting_by_hand(toy):
    inputs = random_inputs(toy.original)
    original, decomposed = (outputs(network, inputs) for network in (toy.original, toy.network))
    labels = np.random.default_rng(1).integers(0, original.shape[1], SAMPLES)
    labels[:4] = original[:4].argmax(1)
    metrics = agreement(Calibration.read({**inputs, "labels": labels}, toy.original), toy)

    def hits(scores, expected, top):
        better = [sum(row > row[k]) for row, k in zip(scores, expected, strict=True)]
        return sum(rank < top for rank in better) / SAMPLES

    first = original.argmax(1)
    max_difference = np.abs(decomposed - original).max() / np.abs(original).max()
    assert vars(metrics) == {
        "max_relative_difference": pytest.approx(max_difference, rel=1e-4),
        "samples": SAMPLES,
        **{f"top{top}_agreement": hits(decomposed, first, top) for top in (1, 5)},
        **{f"top{top}_accuracy": hits(decomposed, labels, top) for top in (1, 5)},
        **{f"top{top}_accuracy_original": hits(original, labels, top) for top in (1, 5)},
    }
    assert 0 < metrics.top1_agreement < 1, "nothing would be compared"
    without_labels = agreement(Calibration.read(inputs, toy.original), toy)
    assert without_labels.top5_agreement == metrics.top5_agreement and without_labels.top1_accuracy is None


def single_map() -> onnx.ModelProto:
    """The hourglass with one channel of scores at the end."""
    model = hourglass()
    weights = numpy_helper.to_array(model.graph.initializer[-1])
    assert model.graph.initializer[-1].name == "w6"
    model.graph.initializer[-1].CopyFrom(numpy_helper.from_array(weights[:1], "w6"))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, (1, 1, 32, 32)))
    return model


@pytest.mark.long
@pytest.mark.parametrize("model", [hourglass, single_map])
def test_maps_against_sets_of_pixels(model):
    change = decompose(frontend.load(model()), DecompositionRequest.parse("tucker:0.5"))
    inputs = random_inputs(change.original, 3)
    original, decomposed = (outputs(network, inputs) for network in (change.original, change.network))
    single = original.shape[1] == 1
    maps = [(y[:, 0] > 0).astype(int) if single else y.argmax(1) for y in (original, decomposed)]
    labels = np.roll(maps[0], 3, axis=2)
    metrics = agreement(Calibration.read({**inputs, "labels": labels}, change.original), change)

    def dice(a, b):
        shares = []
        for number in (1,) if single else range(original.shape[1]):
            pixels_a, pixels_b = (set(zip(*np.nonzero(x == number), strict=True)) for x in (a, b))
            if pixels_a or pixels_b:
                shares.append(2 * len(pixels_a & pixels_b) / (len(pixels_a) + len(pixels_b)))
        return sum(shares) / len(shares)

    max_difference = np.abs(decomposed - original).max() / np.abs(original).max()
    assert vars(metrics) == {
        "max_relative_difference": pytest.approx(max_difference, rel=1e-4),
        "samples": 3,
        "dice": pytest.approx(dice(maps[1], maps[0])),
        "dice_to_labels": pytest.approx(dice(maps[1], labels)),
        "dice_to_labels_original": pytest.approx(dice(maps[0], labels)),
    }
    assert 0.1 < metrics.dice < 1


@pytest.mark.long
def test_the_report_has_it(tmp_path):
    network = frontend.load("toy")
    np.savez(tmp_path / "data.npz", **random_inputs(network, 3))
    path = tmp_path / "data.npz"
    compiled = pimflow.compile("toy", decompose="tucker:1", calibration=path, modes="gpu", conventions="none")
    part = compiled.report.extras.decomposition.calibration
    assert 0 < part.max_relative_difference < 1e-5  # all ranks are kept
    shares = {name: value for name, value in vars(part).items() if name != "max_relative_difference"}
    assert shares == {"samples": 3, "top1_agreement": 1.0, "top5_agreement": 1.0} | dict.fromkeys(
        f"top{top}_accuracy{which}" for top in (1, 5) for which in ("", "_original")
    )
    from pimflow.commands.shared import report_text

    assert "the original's class comes first for 100.0%" in report_text.table(compiled.report, None)


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda a: a.pop("input"), "input 'input' is missing; give 'input' as float32 of shape [samples, 3,"),
        (lambda a: a.update(imput=a.pop("input")), "no input 'imput'; did you mean input?"),
        (lambda a: a.update(input=a["input"][:, :2]), "'input' has shape [2, 2,"),
        (lambda a: a.update(input=a["input"].astype(str)), "and dtype <U"),
        (lambda a: a.update(input=a["input"][:0]), "0 samples"),
        (lambda a: a.update(input=a["input"] * np.nan), "no finite numbers"),
        (lambda a: a.update(labels=np.zeros(3, int)), "'labels' has shape [3] and dtype int64; give"),
        (lambda a: a.update(labels=np.zeros(2)), "dtype float64; give integers of shape [2]"),
        (lambda a: a.update(labels=np.array([0, 10])), "'labels' are 0 to 10; the classes are 0 to 9"),
        (lambda a: a.update(input=np.array([None, None])), "not an .npz file of plain arrays"),
    ],
)
def test_what_does_not_fit_is_refused(change, said, tmp_path, capsys):
    arrays = random_inputs(frontend.load("toy"), 2)
    change(arrays)
    path = tmp_path / "data.npz"
    np.savez(path, **arrays)
    options = ["--decompose", "tucker:0.5", "--calibration", str(path), "--quiet"]
    err = error_line(capsys, 3, "compile toy", *options)
    assert f"{path}: " in err and said in err


@pytest.mark.long
def test_an_array_without_a_name_and_a_damaged_file_are_refused(tmp_path):
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(CalibrationError, match="cannot be read"):
        Calibration.read(tmp_path / "none.npz", frontend.load("toy"))
    with pytest.raises(CalibrationError, match="one array without a name"):
        Calibration.read(tmp_path / "one.npy", frontend.load("toy"))
    path = tmp_path / "data.npz"
    np.savez_compressed(path, input=np.arange(1000.0))
    content = bytearray(path.read_bytes())
    for begin in range(60, len(content) - 1, len(content) // 12):
        path.write_bytes(content[:begin] + bytes([content[begin] ^ 255]) + content[begin + 1 :])
        with pytest.raises(CalibrationError):
            Calibration.read(path, frontend.load("toy"))


def test_without_decomposition_there_is_nothing_to_compare(capsys):
    assert "give --decompose too" in error_line(capsys, 2, "compile toy --calibration data.npz --quiet")
