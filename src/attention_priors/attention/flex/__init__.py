"""FlexAttention backend, and score and mask functions for direct use with FlexAttention."""
