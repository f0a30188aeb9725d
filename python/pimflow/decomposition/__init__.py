"""Decomposition of layers into chains of smaller ones (TeMCO); skip connections and activations."""
