"""Tokens that are drawn, texts that end before others, chat templates, tokenizers beside models."""

import json
import shutil

import numpy as np
import onnx
import pytest
from command_line import error_line
from decoders import DecoderModel
from test_hf_folders import CONFIG, SHAPES, write_tensors

from pimflow.commands.generate.generate import generate
from pimflow.commands.generate.language import open_language_model
from pimflow.commands.generate.requests import StopText
from pimflow.commands.generate.sampling import Sampler
from pimflow.errors import ModelError, UsageError
from pimflow.zoo.language.chat_template import folder_template

LOGITS = np.array([2.0, 1.0, 0.5, -1.0, 1.9])
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def softmax(x):
    shares = np.exp(x - x.max())
    return shares / shares.sum()


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "kept"), [({}, [0, 1, 2, 3, 4]), ({"top_k": 3}, [0, 1, 4]), ({"top_p": 0.5}, [0, 4])]
)
def test_tokens_are_drawn_as_often_as_they_are_likely(options, kept):
    """At a temperature, and among those that are kept; the same seed draws the same."""
    sampler = Sampler(temperature=2.0, **options)
    draws = [sampler.choose(LOGITS, number) for number in range(4000)]
    expected = np.zeros(5)
    expected[kept] = softmax(LOGITS[kept] / 2.0)
    assert np.abs(np.bincount(draws, minlength=5) / 4000 - expected).max() < 0.03
    assert draws[:50] == [Sampler(temperature=2.0, **options).choose(LOGITS, number) for number in range(50)]
    assert draws[:50] != [Sampler(temperature=2.0, seed=1, **options).choose(LOGITS, n) for n in range(50)]


@pytest.mark.long
def test_a_choice_is_certain_if_no_logits_within_the_error_change_it():
    """Against choices by many such logits, for all kinds of limits."""
    rng = np.random.default_rng(3)
    certain = 0
    for case in range(300):
        logits = rng.normal(size=8) * 3
        options = ([0.0, 0.7, 2.0], [0, 1, 3], [1.0, 0.5, 0.9])
        temperature, top_k, top_p = (rng.choice(option) for option in options)
        sampler = Sampler(temperature=float(temperature), top_k=int(top_k), top_p=float(top_p))
        if sampler.is_certain(logits, case, 0.1):
            certain += 1
            moved = [logits + rng.choice([-0.1, 0.1], size=8) for _ in range(60)]
            assert {sampler.choose(x, case) for x in moved} == {sampler.choose(logits, case)}
    assert certain > 100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((-1.0, None, None, None), "--temperature -1.0"),
        ((0.0, 3, None, None), "--top-k: give --temperature too"),
        ((1.0, 0, None, None), "--top-k 0"),
        ((1.0, None, 1.5, None), "--top-p 1.5"),
        ((1.0, None, None, -1), "--seed -1"),
    ],
)
def test_options_without_effect_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        Sampler.from_options(*options)


def test_a_text_ends_before_a_stop_that_comes_in_pieces():
    """What may become one is held back, and comes if it does not."""
    stop = StopText(["###", "END"])
    assert [stop.push(piece, False) for piece in ("a#", "#b", "E", "x")] == ["a", "##b", "", "Ex"]
    assert stop.push("y EN", False) == "y " and not stop.is_found
    assert stop.push("D more", False) == "" and stop.is_found
    last = StopText(["###"])
    assert last.push("a##", True) == "a##" and not last.is_found


@pytest.mark.long
def test_drawn_tokens_are_those_of_the_references_logits():
    """And a text ends before its first stop."""
    options = {"temperature": 1.5, "top_k": 40, "top_p": 0.95, "seed": 7}
    reference, sampler, tokens = open_language_model("tiny-lm").reference(), Sampler(**options), []
    logits = reference.step(np.frombuffer(b"The ", np.uint8).astype(np.int64))[-1]
    for number in range(6):
        tokens.append(sampler.choose(logits, number))
        logits = reference.step(np.array(tokens[-1:]))[-1]
    text = bytes(tokens).decode()
    end = text.index(text[4])
    generation = generate("tiny-lm", prompt="The ", n=6, modes="gpu", stop=["#!", text[4]], **options)
    assert generation.text == text[:end] and generation.tokens == tuple(tokens[: end + 1])
    assert generation.verified and generation.sure_tokens > 0


@pytest.fixture
def chat_folder(tmp_path):
    """A folder with a tokenizer of words, and a template."""
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    folder = tmp_path / "model"
    folder.mkdir()
    rng = np.random.default_rng(0)
    write_tensors(folder / "model.safetensors", {n: rng.normal(size=dims) for n, dims in SHAPES.items()})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "hello": 3, "you": 4, "<|user|>": 5, "<|assistant|>": 6}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["</s>", "<|user|>", "<|assistant|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": {"content": "</s>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_chat_is_written_as_the_template_says(chat_folder):
    """And refused where there is none, or where it refuses."""
    language = open_language_model(chat_folder)
    assert language.tokenize_prompts("hello you", None) == [[3, 4]]
    assert language.tokenize_prompts("hello you", None, chat=True) == [[5, 3, 4, 2, 6]]
    with pytest.raises(UsageError, match="--chat: what a user says is text"):
        language.tokenize_prompts(None, [3], chat=True)
    (chat_folder / "chat_template.jinja").write_text("{{ raise_exception('only systems') }}")
    with pytest.raises(ModelError, match="its chat template fails: only systems"):
        open_language_model(chat_folder).tokenize_prompts("hello", None, chat=True)
    (chat_folder / "chat_template.jinja").write_text("{{ ''.__class__.__mro__ }}")
    with pytest.raises(ModelError, match=r"its chat template fails: .*unsafe"):
        open_language_model(chat_folder).tokenize_prompts("hello", None, chat=True)
    with pytest.raises(UsageError, match="--chat: 'tiny-lm' has no chat template"):
        open_language_model("tiny-lm").tokenize_prompts("hello", None, chat=True)


def test_a_tokenizer_beside_a_model_is_its_own(chat_folder, tmp_path):
    """Or one that is named."""
    path = tmp_path / "step.onnx"
    onnx.save(DecoderModel(mask="given").model(), path)
    assert open_language_model(path).tokenizer is None
    named = open_language_model(path, chat_folder)
    assert named.tokenize_prompts("hello you", None, chat=True) == [[5, 3, 4, 2, 6]] and named.ends == {2, 7}
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(chat_folder / name, tmp_path / name)
    assert open_language_model(path).tokenize_prompts("hello you", None) == [[3, 4]]
    assert folder_template(tmp_path) is not None
    with pytest.raises(UsageError, match=r"--tokenizer .*none: no such file"):
        open_language_model(path, tmp_path / "none")


def test_wrong_options_are_one_line(capsys):
    line = error_line(capsys, 2, "generate", "tiny-lm", "--prompt", "a", "-n", "1", "--top-p", "0.5")
    assert "--top-p: give --temperature too" in line
