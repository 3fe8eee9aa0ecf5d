"""FlexAttention engine, and score and mask functions for users of FlexAttention."""
