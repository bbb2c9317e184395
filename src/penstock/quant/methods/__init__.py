"""How a quantized weight's values are chosen: one file for each method."""
