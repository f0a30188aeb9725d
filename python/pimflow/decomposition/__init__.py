"""Networks of decomposed layers: made, chosen, judged; their skip connections and activations."""
