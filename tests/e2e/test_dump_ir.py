"""Does ``--dump-ir`` write the module after every pass, whatever happens to the compilation?"""

import pytest
import tvm
from tvm import relay
from tvm.ir.instrument import pass_instrument

import pimflow
from pimflow import frontend
from pimflow.commands.main import main
from pimflow.compiler.ir_dump import MARK, dump_ir
from pimflow.errors import ArtifactError, UsageError
from pimflow.relay_passes.pim.outline_pim import OutlinePim


def dumped_passes(folder) -> list[str]:
    """Names of the passes in the order of their numbers."""
    names = sorted(path.name for path in folder.glob("*.py"))
    assert [int(name.partition("_")[0]) for name in names] == list(range(1, len(names) + 1))
    assert {path.name for path in folder.iterdir()} == {*names, MARK}
    return [name.partition("_")[2].removesuffix(".py") for name in names]


@pytest.mark.long
def test_the_command_writes_every_pass_of_ours_and_of_tvm(tmp_path, capsys):
    folder, out = tmp_path / "passes", tmp_path / "out"
    command = ["compile", "toy", "--conventions", "none", "--dump-ir", str(folder), "-o", str(out)]
    assert main(command) == 0
    passes = dumped_passes(folder)
    order = ["ConvertLayout", "Canonicalise", "OutlinePim", "RunCodegen", "PlanPool", "tirx.MakePackedAPI"]
    places = [passes.index(name) for name in order]
    assert places == sorted(places) and "sequential" not in passes
    outlined = next(folder.glob(f"*_{OutlinePim.__name__}.py")).read_text()
    assert "class Module:" in outlined and 'R.func_attr({"Codegen": "pim"' in outlined
    (folder / "notes.txt").write_text("mine")
    assert main(command) == 3 and "notes.txt" in capsys.readouterr().err
    assert main([*command[:-1], str(folder / "out")]) == 3
    (folder / "notes.txt").unlink()
    assert main([*command[:-1], str(folder / "out")]) == 2
    assert "one directory is the other or in it" in capsys.readouterr().err
    assert main([*command, "--explain", "fc"]) == 2


@pytest.mark.long
def test_modules_are_there_after_an_error(tmp_path, monkeypatch):
    def fail(*_):
        raise UsageError("no")

    monkeypatch.setattr("pimflow.memory.merge_pools", fail)
    with pytest.raises(UsageError, match=r"^no$"):
        pimflow.compile("toy", dump_ir=tmp_path / "passes", modes="gpu", conventions="none")
    assert dumped_passes(tmp_path / "passes")[-1] == "CallTIRRewrite"


def test_other_parts_of_the_context_hold(tmp_path):
    """Other instruments run too, and a second dump replaces the first."""
    counts = []

    @pass_instrument
    class Count:
        def run_after_pass(self, _, info):
            counts.append(info.name)

    module = frontend.load("toy").module
    for _ in range(2):
        with tvm.transform.PassContext(opt_level=1, instruments=[Count()]), dump_ir(tmp_path / "passes"):
            assert tvm.transform.PassContext.current().opt_level == 1
            relay_pass = tvm.relax.transform.DeadCodeElimination(["main"])
            tvm.transform.Sequential([relay_pass, relay_pass])(module)
    assert dumped_passes(tmp_path / "passes") == ["DeadCodeElimination"] * 2
    assert counts == ["DeadCodeElimination", "DeadCodeElimination", "sequential"] * 2


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    def fail(_):
        raise OSError(28, "No space left on device")

    module = frontend.load("toy").module
    monkeypatch.setattr("pimflow.compiler.ir_dump.file_sha256", fail)
    with pytest.raises(ArtifactError, match="No space left"), dump_ir(tmp_path / "passes"):
        tvm.relax.transform.DeadCodeElimination(["main"])(module)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_relay_takes_it_from_the_pass_context(tmp_path):
    options = {"pimflow.modes": "gpu", "pimflow.dump_ir": str(tmp_path / "passes")}
    with tvm.transform.PassContext(config=options):
        relay.build(frontend.load("toy").module, target="llvm+pim")
    assert "PlanPool" in dumped_passes(tmp_path / "passes")
    with pytest.raises(UsageError, match="is a directory to write, or None, not 3"):
        tvm.transform.PassContext(config={"pimflow.dump_ir": 3})
