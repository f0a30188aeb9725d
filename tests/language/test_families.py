"""Families of decoders as transformers and llama.cpp lay them out: logits beside transformers' own."""

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")

import torch
from language_exports import FAMILIES, make_model, write_form, write_gguf

from pimflow import zoo
from pimflow.zoo.language.decoder_files import read_decoder
from pimflow.zoo.language.reference import ReferenceDecoder

pytestmark = pytest.mark.torch

TOKENS = np.array([5, 17, 200, 43, 9, 77, 120, 31, 8, 250, 61, 19, 3, 300])


@pytest.mark.parametrize("form", ["GGUF", "folder"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family, form, tmp_path):
    try:
        path = write_form(family, form, tmp_path)
    except NotImplementedError as error:
        pytest.skip(str(error))
    require_logits(family, path)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_older_files_of_deepseek_are_read(family, tmp_path):
    """They have one product for the keys and values of all heads."""
    require_logits(family, write_gguf(family, tmp_path, older=True))


def require_logits(family, path):
    """Raise unless a file gives the logits of transformers."""
    decoder = read_decoder(path)
    ours = ReferenceDecoder(decoder, zoo.decoder_weights(decoder), np.float64).step(TOKENS)
    with torch.no_grad():
        theirs = make_model(family)(torch.tensor(TOKENS)[None]).logits[0].numpy()
    assert np.abs(ours - theirs).max() < 1e-5 * np.abs(theirs).max()
