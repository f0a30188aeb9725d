"""Times of convolution primitives: measured, predicted, modelled, kept."""
