"""Decoders in PyTorch with the caches of transformers: buffers of fixed length, and tensors that grow."""

import pytest

pytest.importorskip("torch")

import torch
from torch.utils import _pytree

from pimflow.commands.generate.generate import generate
from pimflow.commands.generate.language import open_language_model
from pimflow.errors import ModelError, UsageError

pytestmark = pytest.mark.torch

HEADS, SIZE, PLACES, VOCABULARY = 2, 16, 12, 61
WIDTH = HEADS * SIZE
PROMPT, WINDOW = [3, 14, 15], 5


class Cache:
    """A container of a class that PyTorch knows only while it is registered."""

    def __init__(self, key, value):
        self.key, self.value = key, value


class CachedDecoder(torch.nn.Module):
    """A block of attention, over a cache in buffers (`places`) or one that it is given."""

    def __init__(self, places: int) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.tokens, self.positions = torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Embedding(64, WIDTH)
        self.query, self.key, self.value, self.out = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
        for name in ("keys", "values") if places else ():
            self.register_buffer(name, torch.zeros(1, HEADS, places, SIZE), persistent=False)
        self.register_buffer("length", torch.tensor(0), persistent=False)

    def forward(self, input_ids, position_ids, cache=None, mask=None):
        """Logits, and the cache if it was given."""
        x = self.tokens(input_ids) + self.positions(position_ids)
        parts = (f(x).view(1, -1, HEADS, SIZE).transpose(1, 2) for f in (self.query, self.key, self.value))
        query, key, value = parts
        if hasattr(self, "keys"):
            self.length.copy_(position_ids[0])
            place = torch.arange(1) + self.length
            key, value = self.keys.index_copy_(2, place, key), self.values.index_copy_(2, place, value)
            places = torch.arange(PLACES)
            mask = (places <= place) & (places > place - WINDOW)
        elif cache is not None:
            key, value = torch.cat([cache.key, key], 2), torch.cat([cache.value, value], 2)
        scores = query @ key.transpose(2, 3) / SIZE**0.5
        scores = scores if mask is None else scores.masked_fill(~mask, float("-inf"))
        mixed = (torch.softmax(scores, -1) @ value).transpose(1, 2).reshape(1, -1, WIDTH)
        logits = (x + self.out(mixed)) @ self.tokens.weight.T
        return logits if cache is None else (logits, Cache(key, value))


def greedy_tokens(n: int, window: int) -> tuple[int, ...]:
    """The next tokens, without a cache, by PyTorch itself; each attends to a window of the last ones."""
    decoder, sequence = CachedDecoder(0).eval(), list(PROMPT)
    while len(sequence) < len(PROMPT) + n:
        places = torch.arange(len(sequence))
        with torch.no_grad():
            behind = places[:, None] - places
            mask = (behind >= 0) & (behind < window)
            logits = decoder(torch.tensor([sequence]), places, mask=mask)
        sequence.append(int(logits[0, -1].argmax()))
    return tuple(sequence[len(PROMPT) :])


def export(decoder: CachedDecoder, cache: Cache | None, axes: dict) -> torch.export.ExportedProgram:
    """The program of a step of one token."""
    numbers = (torch.tensor([[5]]), torch.tensor([3]))
    if cache is None:
        return torch.export.export(decoder, numbers, strict=False)
    shapes = (None, None, [axes, axes])
    return torch.export.export(decoder, (*numbers, cache), strict=False, dynamic_shapes=shapes)


@pytest.fixture
def registered():
    """`Cache` is registered within; call the value to end that."""
    _pytree.register_pytree_node(
        Cache,
        lambda cache: ([cache.key, cache.value], "cache"),
        lambda values, _: Cache(*values),
        serialized_type_name="elsewhere.Cache",
        flatten_with_keys_fn=lambda cache: (
            [(_pytree.GetAttrKey(name), getattr(cache, name)) for name in ("key", "value")],
            "cache",
        ),
    )
    yield lambda: _pytree._deregister_pytree_node(Cache)
    if Cache in _pytree.SUPPORTED_NODES:
        _pytree._deregister_pytree_node(Cache)


@pytest.mark.long
@pytest.mark.parametrize("form", ["static", "dynamic"])
def test_a_program_writes_what_pytorch_does_without_a_cache(form, registered, tmp_path):
    """Also if its cache is an object of a class that is not there when it is read, or has a window."""
    path, empty = tmp_path / "step.pt2", Cache(*(torch.zeros(1, HEADS, 3, SIZE) for _ in range(2)))
    program = (
        export(CachedDecoder(PLACES).eval(), None, {})
        if form == "static"
        else export(CachedDecoder(0).eval(), empty, {2: torch.export.Dim.AUTO})
    )
    torch.export.save(program, path)
    registered()
    generation = generate(path, tokens=PROMPT, n=4, modes="gpu")
    window = WINDOW if form == "static" else PLACES
    assert generation.tokens == greedy_tokens(4, window) and generation.sure_tokens > 0
    assert generation.context == (PLACES if form == "static" else len(PROMPT) + 4)
    assert generation.kv_bytes_per_token == 2 * HEADS * SIZE * 2
    with pytest.raises(UsageError, match="is a step of 1 sequence: give one prompt"):
        generate(path, tokens=PROMPT, n=4, batch=2)


def test_a_program_that_reads_unused_places_is_refused(registered, tmp_path):
    """Before anything runs: its cache has a fixed length, and no mask."""
    empty = Cache(*(torch.zeros(1, HEADS, 3, SIZE) for _ in range(2)))
    torch.export.save(export(CachedDecoder(0).eval(), empty, {}), tmp_path / "step.pt2")
    registered()
    with pytest.raises(ModelError, match="attends to all 3 places of its caches, used or not"):
        open_language_model(tmp_path / "step.pt2")
