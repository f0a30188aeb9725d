"""``pimflow generate``: tokens against decoders that share no code, figures against one another, refusals."""

import json
from dataclasses import fields

import numpy as np
import onnx
import onnxruntime
import pytest
from command_line import error_line, run_json
from decoders import SMALL, greedy
from onnx import TensorProto, numpy_helper

from pimflow import frontend, zoo
from pimflow.commands.generate import decoding
from pimflow.commands.generate.generate import generate
from pimflow.commands.generate.generation import Generation
from pimflow.commands.generate.language import open_language_model
from pimflow.commands.main import main
from pimflow.commands.shared import prepare
from pimflow.errors import VerificationError
from pimflow.zoo.language import graph

PROMPT = [3, 4, 5]


@pytest.fixture(scope="module")
def step_model():
    """A multi-query decoder of one token after a cache of eleven, with weights."""
    return zoo.load_model(graph.step_graph(SMALL, 12))


@pytest.fixture(scope="module")
def generation(step_model):
    told = []
    return generate(step_model, tokens=PROMPT, n=6, on_text=told.append), told


def test_what_is_done_once_a_step_is_what_no_data_reaches():
    """Times of a model count it once; the rest of a block, as often as the model has blocks."""
    block = prepare.regions(frontend.load(graph.block_graph(SMALL, 12), context=12))
    reached = set()
    for region in block.regions:
        if any(
            name in reached or (name[0] == "%" and "position" not in name and "mask" not in name)
            for name in region.inputs
        ):
            reached.add(region.name)
    once = decoding.shared_regions(block)
    assert once == {region.name for region in block.regions} - reached
    assert once and not any(block.region(name).geometry for name in once)


@pytest.mark.long
def test_tokens_are_those_of_the_decoder_in_numpy(step_model, generation):
    result, told = generation
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in step_model.graph.initializer}
    assert result.tokens == greedy(SMALL, weights, PROMPT, 6)
    assert result.text is None and told == [f"{token} " for token in result.tokens]


def test_figures_follow_from_one_another(generation):
    result, _ = generation
    assert result.verified and result.timing_violations == 0
    assert 0 < result.max_relative_error <= result.bound == 2e-3 and 0 < result.sure_tokens <= 6
    assert result.tokens_per_s == pytest.approx(1e9 / result.tpot_ns)
    assert result.tokens_per_s_gpu_only == pytest.approx(1e9 / result.tpot_ns_gpu_only)
    assert result.ttft_ns == pytest.approx(3 * result.tpot_ns)  # the file takes one token at a time
    assert result.tpot_ns <= result.tpot_ns_gpu_only
    assert result.kv_bytes_per_token == 2 * 8 * 2 and (result.context, result.batch) == (12, 1)
    assert 0 < result.regions_on_pim < result.regions
    assert 0 < result.fraction_of_bound < 1
    keys = {field.name for field in fields(Generation)}
    extras = ("tpot_ns_gpu_published", "gpu_published")  # of large models
    assert result.to_json().keys() == keys - {"weights_in_pim", "cache", "cache_in_pim", "devices", *extras}


@pytest.mark.long
def test_another_model_under_the_same_names_is_found_out(step_model, monkeypatch):
    """The cache is the state: whoever loses it writes something else, and logits say so."""

    def forgets(self, tokens, past_lengths):
        for state in self.step.states:
            self._set(state.name, np.zeros(*self.step.input_types[state.name]))
        return runs(self, tokens, past_lengths)

    runs = decoding.StepRunner.__call__
    monkeypatch.setattr(decoding.StepRunner, "__call__", forgets)
    with pytest.raises(VerificationError, match="logits are off by"):
        generate(step_model, tokens=PROMPT, n=6, modes="gpu")


def gqa_decoder(lengths=()):
    """A decoder of one GroupQueryAttention, which counts ones of the mask; `lengths` are not open."""
    rng, vocabulary, hidden, heads, kv_heads, size = np.random.default_rng(0), 31, 32, 4, 2, 16
    angles = np.outer(np.arange(64), 100.0 ** -np.linspace(0, 1, size // 2))
    arrays = {"cosines": np.cos(angles), "sines": np.sin(angles)}
    dims = {"table": (vocabulary, hidden), "out": (heads * size, hidden), "head": (hidden, vocabulary)}
    dims |= {"query": (hidden, heads * size)} | dict.fromkeys(("key", "value"), (hidden, kv_heads * size))
    arrays |= {name: rng.normal(size=shape) / 6 for name, shape in dims.items()}
    constants = {name: array.astype(np.float32) for name, array in arrays.items()}
    constants |= {"one": np.array([1]), "last": np.array(1)}
    caches = [f"past_key_values.0.{part}" for part in ("key", "value")]
    presents = ["present.0.key", "present.0.value"]
    nodes = [
        ("Gather", ["table", "input_ids"], ["x"], {}),
        *(("MatMul", ["x", name], [f"x.{name}"], {}) for name in ("query", "key", "value")),
        ("ReduceSum", ["attention_mask", "one"], ["count"], {"keepdims": 1}),
        ("Sub", ["count", "one"], ["before"], {}),
        ("Cast", ["before"], ["seqlens_k"], {"to": TensorProto.INT32}),
        ("Shape", ["attention_mask"], ["shape"], {}),
        ("Gather", ["shape", "last"], ["length"], {}),
        ("Cast", ["length"], ["total"], {"to": TensorProto.INT32}),
        (
            "GroupQueryAttention",
            ["x.query", "x.key", "x.value", *caches, "seqlens_k", "total", "cosines", "sines"],
            ["mixed", *presents],
            {"num_heads": heads, "kv_num_heads": kv_heads, "do_rotary": 1, "domain": "com.microsoft"},
        ),
        ("MatMul", ["mixed", "out"], ["y"], {}),
        ("Add", ["x", "y"], ["z"], {}),
        ("MatMul", ["z", "head"], ["logits"], {}),
    ]

    def values(kind, names, shape):
        shape = [dict(lengths).get(size, size) for size in shape]
        return [onnx.helper.make_tensor_value_info(name, kind, shape) for name in names]

    cache, present = ("batch", kv_heads, "past", size), ("batch", kv_heads, "total", size)
    inputs = values(TensorProto.INT64, ["input_ids"], ("batch", "tokens"))
    inputs += values(TensorProto.INT64, ["attention_mask"], ("batch", "total"))
    inputs += values(TensorProto.FLOAT, caches, cache)
    outputs = values(TensorProto.FLOAT, ["logits"], ("batch", "tokens", vocabulary))
    graph_proto = onnx.helper.make_graph(
        [onnx.helper.make_node(kind, *ends, name=ends[1][0], **attrs) for kind, *ends, attrs in nodes],
        "grouped",
        inputs,
        outputs + values(TensorProto.FLOAT, presents, present),
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)]
    return onnx.helper.make_model(graph_proto, opset_imports=opsets, ir_version=8)


@pytest.mark.long
@pytest.mark.parametrize("past", [None, 11, 12], ids=["open", "fixed", "whole"])
def test_tokens_lie_where_grouped_queries_count_them(past):
    """From the first place of a cache on, in the reference too; the length of a cache is that of the mask."""
    lengths = {} if past is None else {"batch": 1, "tokens": 1, "past": past, "total": 12}
    session = onnxruntime.InferenceSession(gqa_decoder().SerializeToString())
    tokens, empty = list(PROMPT), np.zeros((1, 2, 0, 16), np.float32)
    for _ in range(4):
        feeds = {"input_ids": np.array([tokens]), "attention_mask": np.ones((1, len(tokens)), np.int64)}
        feeds |= {value.name: empty for value in session.get_inputs()[2:]}
        tokens.append(int(session.run(["logits"], feeds)[0][0, -1].argmax()))
    assert len(frontend.load(gqa_decoder(lengths), context=12).states) == 2
    language = open_language_model(gqa_decoder(lengths))
    result = generate(gqa_decoder(lengths), tokens=PROMPT, n=4)
    assert result.tokens == tuple(tokens[len(PROMPT) :]) and result.sure_tokens > 0
    right = language.reference().step(np.array(tokens))
    (*_, rounded) = language.perturbed_logits(frozenset(), np.array(tokens))
    assert language.uses == 2 and np.abs(rounded - right).max() < 1e-4


def test_tiny_lm_writes_by_the_commands_of_its_plan(capsys, monkeypatch):
    """Two prompts in one step, of which one is padded; nothing but the figures is on stdout.

    That step runs once: as it is verified.
    """
    ran, runs = [], decoding.StepRunner.__call__
    call = lambda self, tokens, past: (ran.append(tokens.shape), runs(self, tokens, past))[1]  # noqa: E731
    monkeypatch.setattr(decoding.StepRunner, "__call__", call)
    prompts, decoder = ["The ", "A list of"], zoo.decoder("tiny-lm")
    command = ["generate", "tiny-lm", "-n", "6", "--context", "24", "--quiet", "--json"]
    assert main([*command, *(part for prompt in prompts for part in ("--prompt", prompt))]) == 0
    row = json.loads(capsys.readouterr().out)
    assert ran == [(2, 1)] * 5
    weights = zoo.decoder_weights(decoder)
    assert len(row["requests"]) == 2 and row["tokens"] == row["requests"][0]["tokens"]
    for request, prompt in zip(row["requests"], prompts):
        assert tuple(request["tokens"]) == greedy(decoder, weights, list(prompt.encode()), 6)
        assert request["text"] == bytes(request["tokens"]).decode()
        assert request["prompt_tokens"] == len(prompt)
    assert row["verified"] is True and row["timing_violations"] == 0 and row["regions_on_pim"] > 0
    assert (row["context"], row["batch"], row["blocks"]) == (24, 2, 3)
    assert row["tokens_per_s"] == pytest.approx(2e9 / row["tpot_ns"])
    assert row["kv_bytes_per_token"] == 2 * 3 * 64 * 2
    assert 0 < row["held_bytes"] < row["room_bytes"]


@pytest.mark.long
def test_the_shape_of_a_model_is_a_block_as_often_as_it_has_it(capsys):
    command = ["generate", "gpt-2", "--tokens", "1,2,3", "-n", "2", "--context", "64", "--quiet"]
    row = run_json(capsys, *command)
    assert (row["tokens"], row["text"], row["blocks"], row["compiled_blocks"]) == (None, None, 12, 1)
    assert row["verified"] is True and row["regions_on_pim"] > 0
    assert row["ttft_ns"] > 0.5 * row["tpot_ns"] and row["kv_bytes_per_token"] == 36864
    decoder = zoo.decoder("gpt-2")
    on_pim = row["held_bytes"] / (2 * decoder.parameters)
    assert 0.3 < on_pim < 2  # of the weights; rows are not filled to the end, and the embedding is the GPU's


@pytest.mark.long
def test_a_shape_without_room_is_refused_before_it_is_compiled(monkeypatch, capsys):
    monkeypatch.setattr("pimflow.commands.generate.generate.compile_step", None)
    command = ["generate", "llama-3-8b", "--tokens", "1,2,3", "-n", "1", "--context", "64", "--quiet"]
    assert main(command) == 4
    said = capsys.readouterr().err
    assert "all blocks of 'llama-3-8b' in the PIM channels: needs 12226396160 B, 4294967296 B avail" in said
    assert "--assume-room" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["tiny-lm", "--prompt", "a", "--assume-room"], "no effect on a model with weights, which must fit"),
        (["tinylm", "--prompt", "a"], "unknown language model 'tinylm'; did you mean tiny-lm?"),
        (["alexnet", "--prompt", "a"], "'alexnet' is no language model; those of the zoo are gpt-2"),
        (["tiny-lm"], "give a prompt: --prompt TEXT, or --tokens"),
        (["tiny-lm", "--prompt", "a", "--tokens", "1"], "give a prompt"),
        (["tiny-lm", "--prompt", ""], "the prompt is empty"),
        (["tiny-lm", "--tokens", ""], "the prompt is empty"),
        (["tiny-lm", "--tokens", "1,b"], "--tokens 1,b: give numbers"),
        (["tiny-lm", "--tokens", "256"], "token 256 is none of 'tiny-lm', which has 0 to 255"),
        (["tiny-lm", "--prompt", "a", "-n", "0"], "-n 0: give 1 or more"),
        (["tiny-lm", "--prompt", "abc", "--context", "4"], "give --context 5 or more"),
        (["tiny-lm", "--prompt", "abc", "--context", "0"], "give --context 5 or more"),
        (["tiny-lm", "--prompt", "a\udcff"], "is not UTF-8"),
        (["tiny-lm", "--prompt", "a", "--context", "1025"], "was made for 1024 tokens, not for 1025"),
        (["tiny-lm", "--prompt", "a", "--batch", "0"], "--batch 0"),
        (["tiny-lm", "--prompt", "a", "--prompt", "b", "--batch", "3"], "each of 2 prompts is one sequence"),
        (["tiny-lm", "--prompt", "a", "--prompt", ""], "the prompt is empty"),
        (["tiny-lm", "--prompt", "a", "--prompt", "abc", "--context", "4"], "give --context 5 or more"),
        (["/", "--prompt", "a"], "'/' is a directory without a config.json; give one, a file"),
        (["gpt-2", "--prompt", "a"], "'gpt-2' comes without a tokenizer: give --tokens"),
    ],
)
def test_what_cannot_be_generated_is_refused_in_a_line(argv, says, capsys):
    assert says in error_line(
        capsys, 2, "generate", *(["-n", "2"] if "-n" not in argv else []), *argv, "--quiet"
    )


def edit_graph(model, edit):
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    edit(copy.graph)
    return copy


def drop_inputs(part):
    def drop(graph):
        remaining = [value for value in graph.input if part not in value.name]
        del graph.input[:]
        graph.input.extend(remaining)

    return drop


def rename_presents(graph):
    for node in graph.node:
        node.output[:] = [name.replace("present.", "new.") for name in node.output]
        node.input[:] = [name.replace("present.", "new.") for name in node.input]
    for value in graph.output:
        value.name = value.name.replace("present.", "new.")


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (drop_inputs("past"), "has no cache: inputs past_key_values.N.key and .value are missing"),
        (drop_inputs("0.value"), "has no cache"),
        (drop_inputs("attention_mask"), "has no input 'attention_mask'"),
        (rename_presents, "has no output 'present.0.key', as Optimum calls it"),
        (
            lambda graph: graph.input.append(onnx.ValueInfoProto(name="use_cache_branch")),
            "input 'use_cache_branch'",
        ),
    ],
)
def test_a_file_that_is_no_decoder_with_a_cache_is_refused(how, says, step_model, tmp_path, capsys):
    path = tmp_path / "decoder.onnx"
    path.write_bytes(edit_graph(step_model, how).SerializeToString())
    assert says in error_line(capsys, 3, "generate", path, "--tokens", "1", "-n", "2", "--quiet")


def test_a_file_of_one_length_says_which(step_model, tmp_path, capsys):
    path = tmp_path / "decoder.onnx"
    path.write_bytes(step_model.SerializeToString())
    for argv, says in (
        (["--tokens", "1", "-n", "2", "--context", "13"], "attends to 12 tokens, not to --context 13"),
        (["--tokens", "1,2,3", "-n", "10"], "are more than the 12 that it attends to"),
        (["--prompt", "a", "-n", "2"], "comes without a tokenizer"),
    ):
        assert says in error_line(capsys, 2, "generate", path, *argv, "--quiet")
    assert "cannot be read" in error_line(
        capsys, 3, "generate", tmp_path / "none.onnx", "--tokens", "1", "-n", "2", "--quiet"
    )
