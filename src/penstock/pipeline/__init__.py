"""From a checkpoint to an engine: calibration, quantization."""
