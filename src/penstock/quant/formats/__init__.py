"""One file for each way to store a weight matrix."""
