"""How far roundings alone move the logits of tiny-lm with narrow types: ``narrow_roundings.py``.

The decoder in NumPy (`zoo.language.reference`) runs a text in fp32, and again with every weight and result
rounded to fp16. Prints a table of docs/results_narrow.md, which `update_results.py narrow-roundings` writes.
"""

import numpy as np
from papers.pimflow_tables import markdown

from pimflow import zoo
from pimflow.core.output_error import LARGEST_BOUND
from pimflow.zoo.language.reference import ReferenceDecoder

TEXT = b"The statement is that the license of this work is free"
# By name, types of weights, activations and caches.
TYPES = {
    "fp16": ("fp16", "fp16", "fp16"),
    "W8A8": ("int8", "int8", "fp16"),
    "W4A16": ("int4", "fp16", "fp16"),
    "W4A8": ("int4", "int8", "fp16"),
    "W4A4": ("int4", "int4", "fp16"),
    "KV8": ("fp16", "fp16", "int8"),
    "KV4": ("fp16", "fp16", "int4"),
    "W4A8KV8": ("int4", "int8", "int8"),
    "W4A8KV4": ("int4", "int8", "int4"),
}


def logits(types: tuple[str, str, str], dtype: type) -> np.ndarray:
    """Logits after each token of the text, computed in `dtype`."""
    decoder = zoo.decoder("tiny-lm").with_types(*types)
    with np.errstate(over="ignore"):  # exponentials of fp16, whose shares are zero
        reference = ReferenceDecoder(decoder, zoo.decoder_weights(decoder), dtype)
        return reference.step(np.frombuffer(TEXT, np.uint8)).astype(np.float64)


def main() -> None:
    """Print the table."""
    rows, original = [], logits(TYPES["fp16"], np.float32)
    for name, types in TYPES.items():
        exact, rounded = logits(types, np.float32), logits(types, np.float16)
        moved = np.abs(rounded - exact).max() / np.abs(exact).max()
        changed = np.abs(exact - original).max() / np.abs(original).max()
        same = (exact.argmax(-1) == original.argmax(-1)).mean()
        verdict = "yes" if moved <= LARGEST_BOUND else "no"
        rows.append([name, f"{moved:.3f}", verdict, f"{changed:.3f}", f"{same:.0%}"])
    head = [
        *("types", "moved by roundings", "below the largest bound"),
        *("changed by the types", "same largest logit"),
    ]
    print(markdown(head, rows))


if __name__ == "__main__":
    main()
